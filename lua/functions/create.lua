--[[
roq_create: create a run, or confirm that it exists with the same configuration.

Arguments:
  config    JSON object of text values: the protocol's fields and other settings of the job
  weights   location of the weights of version 0, or ""
Reply:
  created   true if this call created it
Refusals:
  ROQ_CONFIG   it exists with another configuration (the message names the differing keys), or was created by
               another revision
Events: created
]]
local initial = {
  version = 0,
  frontier = 0,
  checkpoint = 0,
  freed = 0,
  next_ordinal = 0,
  next_group = 1,
  next_token = 1,
  trained = 0,
  filtered = 0,
  discarded = 0,
  payload_bytes = 0,
  signal = 0,
  ready_signal = 0,
  next_cancel = 1,
  next_pending = 1,
  paused = 0,
  ended = 0,
  revision = LIBRARY_REVISION,
}

local function differences(existing, wanted)
  local different = {}
  for field, value in pairs(wanted) do
    if existing[field] ~= value then
      different[#different + 1] =
        string.format("%s (run: %s, given: %s)", field, existing[field] or "unset", value)
    end
  end
  for field, value in pairs(existing) do
    if wanted[field] == nil then
      different[#different + 1] = string.format("%s (run: %s, given: unset)", field, value)
    end
  end
  table.sort(different)
  return different
end

transition.plain({
  name = "create",
  arguments = { "config:bytes", "weights:text" },
  apply = function(keys, args)
    local key = context.keys(keys)
    local wanted = text.object(args.config)
    local flat = redis.call("HGETALL", key.config)
    if #flat > 0 then
      context.check_revision(keys, redis.call("HGET", key.state, "revision") or nil)
      local existing = {}
      for i = 1, #flat, 2 do
        existing[flat[i]] = flat[i + 1]
      end
      local different = differences(existing, wanted)
      if #different > 0 then
        refuse.with("CONFIG", "the run exists with another configuration: " .. table.concat(different, "; "))
      end
      return text.json({ created = false })
    end

    for field, value in pairs(wanted) do
      changes.hset(key.config, field, value)
    end
    for field, value in pairs(initial) do
      changes.hset(key.state, field, text.int(value))
    end
    changes.hset(key.state, "created", text.int(context.now()))
    if args.weights ~= "" then
      changes.hset(key.weights, "0", args.weights)
    end
    changes.later("XADD", key.events, "*", "event", "created")
    changes.commit(key)
    return text.json({ created = true })
  end,
})
