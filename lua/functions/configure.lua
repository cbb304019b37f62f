--[[
roq_configure: change settings of a run between starts of its processes. A run that had ended continues when it
has more steps or epochs now. Changing a setting to what it is does nothing.

Arguments:
  changes   JSON object of text values: settings of the job (their names hold a dot), and those fields of the
            protocol that are listed below; "" takes a value away
  by        who asked, human-readable
Reply:
  changed   how many were different
Refusals:
  ROQ_CONFIG   a field cannot be changed, or not to this value
Events: configured, reopened
]]
-- Limits that the library looks up in every call.
local free = {
  stuck_timeout_ms = true,
  max_inflight = true,
  max_payload_bytes = true,
  event_log = true,
  pause_after_failures = true,
}
-- May rise or be taken away: what is in the window stays legal.
local rising = { total_steps = true, epochs = true }

local function check(field, old, new)
  if string.find(field, ".", 1, true) then
    return
  elseif not free[field] and not rising[field] then
    refuse.with("CONFIG", "%s defines the run and cannot be changed; create a new run", field)
  elseif new == "" and field ~= "event_log" then
    return
  end
  local number = arguments.whole(new)
  if not number or number < 1 then
    refuse.with("CONFIG", "%s must be a positive whole number, not %s", field, string.sub(new, 1, 40))
  elseif rising[field] and (not old or number < tonumber(old)) then
    refuse.with("CONFIG", "%s can only be raised (run: %s, given: %s)", field, old or "no limit", new)
  end
end

-- Those that differ, in order: { field, old text or false, new text }.
local function differences(run, wanted)
  local different = {}
  for field, new in pairs(wanted) do
    local old = redis.call("HGET", run.key.config, field)
    if (old or "") ~= new then
      check(field, old, new)
      different[#different + 1] = { field, old, new }
    end
  end
  table.sort(different, function(a, b)
    return a[1] < b[1]
  end)
  return different
end

transition.define({
  name = "configure",
  arguments = { "changes:bytes", "by:text" },
  apply = function(run, args)
    local different, said = differences(run, text.object(args.changes)), {}
    for i, change in ipairs(different) do
      local field, old, new = unpack(change)
      if new == "" then
        changes.hdel(run.key.config, field, old)
      else
        changes.hset(run.key.config, field, new, old)
      end
      if free[field] or rising[field] then
        run.config[field] = tonumber(new)
      end
      said[i] = string.format("%s: %s -> %s", field, old or "unset", new == "" and "unset" or new)
    end
    if #said > 0 then
      events.log(run, "configured", { changes = table.concat(said, "; "), by = args.by })
      if progress.end_reason(run) == "prompts_exhausted" and not supply.exhausted(run) then
        progress.reopen(run, "it has more steps or epochs", args.by)
      end
    end
    return { changed = #said }
  end,
})
