--[[
roq_retire_weights: unregister weights that are no longer needed, so their files can be deleted: all except
the `keep` newest and those pinned by a worker. Version 0 is the user's own model and is never retired.

Arguments:
  trainer   the trainer's name
  keep      newest versions to keep, at least 1
Reply:
  retired   version, location
Refusals:
  ROQ_FENCED     another trainer has taken over
  ROQ_NOT_READY  no trainer has taken a batch yet
]]
transition.define({
  name = "retire_weights",
  arguments = { "trainer:name", "keep:integer" },
  frees = true,
  apply = function(run, args)
    trainers.require(run, args.trainer)
    local pinned = {}
    for _, versions in ipairs(redis.call("HVALS", run.key.pins)) do
      for version in string.gmatch(versions, "%d+") do
        pinned[tonumber(version)] = true
      end
    end
    local oldest_kept = run.state.version - math.max(1, args.keep) + 1
    local flat, retired = redis.call("HGETALL", run.key.weights), {}
    for i = 1, #flat, 2 do
      local version = tonumber(flat[i])
      if version > 0 and version < oldest_kept and not pinned[version] then
        changes.hdel(run.key.weights, flat[i], flat[i + 1])
        retired[#retired + 1] = { version = version, location = flat[i + 1] }
      end
    end
    return { retired = text.array(retired) }
  end,
})
