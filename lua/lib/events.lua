-- The event stream (an audit trail, bounded) and the signals (they wake those who wait).

local M = {}

-- Append an event. `fields` is a flat list of names and values, of which empty values are left out; slot
-- moves so far are added to it.
function M.log(run, name, fields)
  local entry = { "event", name }
  for i = 1, #fields, 2 do
    if fields[i + 1] ~= nil and fields[i + 1] ~= "" then
      entry[#entry + 1] = fields[i]
      local value = fields[i + 1]
      entry[#entry + 1] = type(value) == "number" and text.int(value) or value
    end
  end
  if #run.moves > 0 then
    entry[#entry + 1] = "moves"
    entry[#entry + 1] = table.concat(run.moves, " ")
    run.moves = {}
  end
  redis.call("XADD", run.key.events, "MAXLEN", "~", text.int(run.config.event_log), "*", unpack(entry))
end

local function wake(run, stream, field, reason)
  if run.woken[field] then
    return
  end
  run.woken[field] = true
  context.add(run, field, 1)
  redis.call("XADD", run.key[stream], "MAXLEN", "1", text.int(run.state[field]) .. "-0", "reason", reason)
end

-- Wake the workers that wait for work, once per transition: new weights, or room.
function M.signal(run, reason)
  wake(run, "signals", "signal", reason)
end

-- Wake the trainer: a buffer is READY, or the run is over.
function M.signal_trainer(run, reason)
  wake(run, "ready", "ready_signal", reason)
end

return M
