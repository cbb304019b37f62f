-- The event stream (an audit trail, bounded) and the signal (wakes those who wait).

local M = {}

-- Append an event. `fields` is a flat list of names and values; slot moves so far are added to it.
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

-- Wake everyone who waits, once per transition: a READY buffer, new weights, or room for work.
function M.signal(run, reason)
  if run.signalled then
    return
  end
  run.signalled = true
  context.add(run, "signal", 1)
  local id = text.int(run.state.signal) .. "-0"
  redis.call("XADD", run.key.signals, "MAXLEN", "1", id, "reason", reason)
end

return M
