--[[
roq_checkpointed: a checkpoint of `version` is durable, so the batches before it are no longer needed.
Frees a bounded number of groups per call; the client calls until none is left. Idempotent.

Arguments:
  trainer   the trainer's name
  version   number of updates in the checkpoint
Reply:
  left      number of batches still to free
Refusals:
  ROQ_FENCED     another trainer has taken over
  ROQ_NOT_READY  the version is not published yet
Events: checkpointed
]]
local FREED = 16 -- groups in one call

-- Free groups of one batch; returns how many, and the groups that are left of it.
local function free(run, version, budget)
  local left, freed = {}, 0
  for _, id in ipairs(batches.read(run, version) or {}) do
    if freed < budget then
      groups.delete(run, groups.known(run, tonumber(id)))
      freed = freed + 1
    else
      left[#left + 1] = id
    end
  end
  return freed, left
end

transition.define({
  name = "checkpointed",
  arguments = { "trainer:name", "version:integer" },
  frees = true,
  apply = function(run, args)
    local state = run.state
    trainers.require(run, args.trainer)
    if args.version > state.version then
      refuse.with(
        "NOT_READY",
        "checkpoint %d is newer than the published version %d",
        args.version,
        state.version
      )
    end
    trainers.seen(run)
    if args.version > state.checkpoint then
      context.set(run, "checkpoint", args.version)
      events.log(run, "checkpointed", { version = args.version, trainer = args.trainer })
    end
    local budget = FREED
    while budget > 0 and state.freed < state.checkpoint do
      local freed, left = free(run, state.freed, budget)
      budget = budget - math.max(1, freed)
      batches.write(run, state.freed, left)
      if #left == 0 then
        context.add(run, "freed", 1)
      end
    end
    if run.config.max_payload_bytes then
      events.signal(run, "freed")
    end
    return { left = state.checkpoint - state.freed }
  end,
})
