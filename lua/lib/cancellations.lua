-- Cancellations: the claims that a worker should stop generating. Every renewal returns them until acknowledged.

local M = {}

local TOLD = 1000 -- cancellations returned by one renewal

-- Add a cancellation, which the worker gets with its next renewal.
function M.tell(run, worker, name, token, reason)
  local sequence = context.next(run, "next_cancel")
  reason = reason == "" and "unknown" or string.gsub(reason, "[%s%c%z]+", "_")
  local entry = string.format("%s %012.0f %s %.0f %s", worker, sequence, name, token, reason)
  changes.zadd(run.key.cancelled, "0", entry)
end

-- The cancellations of a worker after `acknowledged`: claims, the newest sequence number.
function M.read(run, worker, acknowledged)
  local first, last = text.entries_of(worker)
  if acknowledged > 0 then
    local seen = string.format("[%s %012.0f!", worker, acknowledged)
    changes.zrem_names(run.key.cancelled, first, seen)
  end
  local told, newest = {}, acknowledged
  for _, entry in
    ipairs(redis.call("ZRANGEBYLEX", run.key.cancelled, first, last, "LIMIT", "0", text.int(TOLD)))
  do
    local sequence, group, member, token, reason = string.match(entry, " (%d+) (%d+)%.(%d+) (%d+) (%S+)$")
    newest = tonumber(sequence)
    told[#told + 1] = {
      group = tonumber(group),
      member = tonumber(member),
      token = tonumber(token),
      reason = reason,
    }
  end
  return told, newest
end

-- Forget the cancellations of a worker.
function M.forget(run, worker)
  changes.zrem_names(run.key.cancelled, text.entries_of(worker))
end

return M
