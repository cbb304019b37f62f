-- Remove a group from the run before it is trained, and decide what happens to its prompt.

local M = {}

local HOPELESS = 16 -- reservations cancelled in one call

local function attempts(record)
  local most = 0
  for _, member in ipairs(record.members) do
    most = math.max(most, member.attempt)
  end
  return most
end

-- The fates of a retired group's prompt; each returns the outcome.
local fates = {
  requeue = function(run, record, reason)
    return supply.requeue(run, record.ordinal, record.drops + 1, attempts(record), reason)
  end,
  bury = function(run, record, reason)
    return supply.bury(run, record.ordinal, record.drops + 1, attempts(record), reason)
  end,
  discard = function(run)
    context.add(run, "discarded", 1)
    return "discarded"
  end,
  filter = function(run)
    context.add(run, "filtered", 1)
    return "filtered"
  end,
}

-- Remove a live group from the run; `fate` is one of the above, `by` who asked for it, if known. Returns
-- the outcome for its prompt.
function M.group(run, record, fate, reason, by)
  local kind, buffer, slot = slots.find(run, record.group)
  claims.cancel_open(run, record, reason)
  placement.remove(run, record.group)
  groups.delete(run, record)
  local outcome = fates[fate](run, record, reason)
  events.log(run, outcome, {
    group = record.group,
    ordinal = record.ordinal,
    from = kind .. " " .. text.place(buffer, slot),
    reason = reason,
    by = by,
  })
  events.signal(run, outcome)
  return outcome
end

-- With over-sampling: cancel Reserved groups for which every legal buffer is READY, a bounded number per
-- call; whoever calls next goes on.
function M.hopeless(run)
  local needing, last = run.state.frontier, context.last_buffer(run, run.state.version)
  while needing <= last and slots.is_ready(run, needing) do
    needing = needing + 1
  end
  local bound = needing > last and run.state.version + 1 or math.max(0, needing - run.config.eta)
  local hopeless = slots.reserved_before(run, bound, HOPELESS)
  for _, group in ipairs(hopeless) do
    M.group(run, groups.known(run, tonumber(group)), "discard", "surplus")
  end
  context.set(run, "sweeping", #hopeless == HOPELESS and 1 or 0)
end

return M
