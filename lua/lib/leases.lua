-- Leases. A lease belongs to a worker: its heartbeat extends everything it holds. When it runs out, any later
-- call makes its claims pending again, a bounded number per call.

local M = {}

local REAP = 16 -- expired claims handled in one call
local REMEMBERED = 256 -- departed workers whose cancellations are kept for their return

-- Extend a worker's lease, and attach it when it is new. Returns its record.
function M.touch(run, worker)
  if changes.zadd(run.key.heartbeats, text.int(run.now + run.config.lease_ms), worker) then
    return workers.live(run, worker)
  end
  local left = redis.call("ZSCORE", run.key.departed, worker)
  local record = { worker = worker, since = run.now, draining = left and tonumber(left) % 1 ~= 0 or nil }
  changes.zrem(run.key.departed, worker, left)
  workers.write(run, record)
  events.log(run, "worker_joined", { worker = worker })
  return record
end

-- Remove a worker that holds no claim. One that lost claims may wake and must learn of it:
-- its cancellations stay, for the most recent such workers.
function M.remove(run, worker, told)
  local draining = told and workers.live(run, worker).draining
  changes.zrem(run.key.heartbeats, worker)
  changes.hdel(run.key.workers, worker)
  changes.hdel(run.key.pins, worker)
  if not told then
    cancellations.forget(run, worker)
    changes.zrem(run.key.departed, worker)
    return
  end
  -- Half a millisecond marks a draining worker: it must still leave when it wakes.
  changes.zadd(run.key.departed, text.int(run.now) .. (draining and ".5" or ""), worker)
  if redis.call("ZCARD", run.key.departed) > REMEMBERED then
    local oldest = redis.call("ZRANGE", run.key.departed, "0", "0")[1]
    changes.zrem(run.key.departed, oldest)
    cancellations.forget(run, oldest)
  end
end

-- Make one claim of a worker pending again. Returns "pending" or "dead".
function M.reopen(run, record, m, failed, keep, reason)
  claims.reopen(run, record, m, failed, keep)
  if failed and claims.out_of_attempts(run, record, m) then
    return retire.group(run, record, "bury", reason)
  end
  groups.write(run, record)
  return "pending"
end

-- Expire one claim of a dead worker, unless it has just left with its group.
local function expire(run, worker, name)
  local group, m = text.parse_member(name)
  local record = groups.find(run, group)
  local member = record and groups.part(record, m)
  if member and member.worker == worker then
    cancellations.tell(run, worker, name, member.token, "lease_expired")
    events.log(run, "expired", { group = group, member = m, worker = worker })
    M.reopen(run, record, m, true, true, "the lease of " .. worker .. " ran out")
  end
end

-- Deferred work, done by the next caller: expire the claims of workers whose
-- lease has run out, and cancel more hopeless reservations. Returns true when expired claims remain.
function M.maintain(run)
  if run.state.sweeping == 1 then
    retire.hopeless(run)
  end
  local dead =
    redis.call("ZRANGEBYSCORE", run.key.heartbeats, "-inf", text.int(run.now), "LIMIT", "0", text.int(4))
  local left = REAP
  for _, worker in ipairs(dead) do
    local names = claims.names_of(run, worker, left)
    for _, name in ipairs(names) do
      expire(run, worker, name)
    end
    left = left - #names
    if left <= 0 then
      events.signal(run, "expired")
      return true
    end
    M.remove(run, worker, true)
    events.log(run, "worker_lost", { worker = worker })
    events.signal(run, "expired")
  end
end

return M
