-- Workers and their leases. The lease is the worker's: its heartbeat extends everything it holds, and
-- when it runs out, whoever calls next makes its claims pending again, a bounded number per call.

local M = {}

local REAP = 16 -- expired claims handled in one call
local TOLD = 1000 -- cancellations told in one renewal
local REMEMBERED = 256 -- departed workers whose cancellations are kept for their return

local function of(worker)
  return "[" .. worker .. " ", "[" .. worker .. "!" -- '!' follows ' '
end

-- What a worker said of itself and what is said of it; nil when it is not attached.
function M.read(run, worker)
  local record = redis.call("HGET", run.key.workers, worker)
  return record and text.object(record) or nil
end

function M.write(run, record)
  redis.call("HSET", run.key.workers, record.worker, text.json(record))
end

-- Extend a worker's lease, and attach it when it is new. Returns its record.
function M.touch(run, worker)
  if redis.call("ZADD", run.key.heartbeats, text.int(run.now + run.config.lease_ms), worker) == 0 then
    return M.read(run, worker)
  end
  local left = redis.call("ZSCORE", run.key.departed, worker)
  local record = { worker = worker, since = run.now, draining = left and tonumber(left) % 1 ~= 0 or nil }
  redis.call("ZREM", run.key.departed, worker)
  M.write(run, record)
  events.log(run, "worker_joined", { worker = worker })
  return record
end

-- Pins are text: "3 5" while a worker that serves version 3 loads version 5.
function M.pin(run, worker, version)
  local pins = redis.call("HGET", run.key.pins, worker)
  local loaded = pins and string.match(pins, "^%d+")
  local wanted = text.int(version)
  if loaded and loaded ~= wanted then
    wanted = loaded .. " " .. wanted
  end
  redis.call("HSET", run.key.pins, worker, wanted)
end

-- A worker has loaded a version: pins of older ones end.
function M.pin_loaded(run, worker, version)
  local pins = text.int(version)
  local loading = string.match(redis.call("HGET", run.key.pins, worker) or "", "^%d+ (%d+)$")
  if loading and tonumber(loading) > version then
    pins = pins .. " " .. loading
  end
  redis.call("HSET", run.key.pins, worker, pins)
end

-- Keep a worker's last failure, for those who ask why nothing moves.
function M.note_error(run, worker, message)
  local record = M.read(run, worker)
  if record then
    record.error, record.error_at = message, run.now
    M.write(run, record)
  end
end

-- Claims of a worker, at most `limit`: members' names.
function M.claims(run, worker, limit)
  local first, last = of(worker)
  local names = redis.call("ZRANGEBYLEX", run.key.claims, first, last, "LIMIT", "0", text.int(limit))
  for i, name in ipairs(names) do
    names[i] = string.sub(name, #worker + 2)
  end
  return names
end

function M.count_claims(run, worker)
  return redis.call("ZLEXCOUNT", run.key.claims, of(worker))
end

-- Tell a worker, at its next renewal, to stop generating a claim.
function M.tell_cancelled(run, worker, name, token, reason)
  local sequence = context.next(run, "next_cancel")
  reason = reason == "" and "unknown" or string.gsub(reason, "[%s%c%z]+", "_")
  local entry = string.format("%s %012.0f %s %.0f %s", worker, sequence, name, token, reason)
  redis.call("ZADD", run.key.cancelled, "0", entry)
end

-- The cancellations of a worker after `acknowledged`: claims, the newest sequence number.
function M.cancellations(run, worker, acknowledged)
  local first, last = of(worker)
  if acknowledged > 0 then
    local seen = string.format("[%s %012.0f!", worker, acknowledged)
    redis.call("ZREMRANGEBYLEX", run.key.cancelled, first, seen)
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

-- Remove what describes a worker that holds no claim. One that lost claims may wake and must be told:
-- its cancellations stay, for the most recent of such workers.
function M.remove(run, worker, told)
  local draining = told and M.read(run, worker).draining
  redis.call("ZREM", run.key.heartbeats, worker)
  redis.call("HDEL", run.key.workers, worker)
  redis.call("HDEL", run.key.pins, worker)
  if not told then
    redis.call("ZREMRANGEBYLEX", run.key.cancelled, of(worker))
    redis.call("ZREM", run.key.departed, worker)
    return
  end
  -- Half a millisecond says that it was asked to go: it is still to go when it wakes.
  redis.call("ZADD", run.key.departed, text.int(run.now) .. (draining and ".5" or ""), worker)
  if redis.call("ZCARD", run.key.departed) > REMEMBERED then
    local oldest = redis.call("ZPOPMIN", run.key.departed)[1]
    redis.call("ZREMRANGEBYLEX", run.key.cancelled, of(oldest))
  end
end

-- Make one claim of a worker pending again. Returns "pending" or "dead".
function M.reopen(run, record, m, failed, keep, reason)
  groups.reopen(run, record, m, failed, keep)
  if failed and groups.out_of_attempts(run, record, m) then
    return groups.retire(run, record, "bury", reason)
  end
  groups.write(run, record)
  return "pending"
end

-- Expire one claim of a dead worker, unless it went with its group a moment ago.
local function expire(run, worker, name)
  local group, m = text.parse_member(name)
  local record = groups.find(run, group)
  local member = record and groups.part(record, m)
  if member and member.worker == worker then
    M.tell_cancelled(run, worker, name, member.token, "lease_expired")
    events.log(run, "expired", { group = group, member = m, worker = worker })
    M.reopen(run, record, m, true, true, "the lease of " .. worker .. " ran out")
  end
end

-- Work that is left over from earlier calls, done by whoever calls: expire the claims of workers whose
-- lease has run out, and go on cancelling hopeless reservations. Returns true when expired claims remain.
function M.reap(run)
  if run.state.sweeping == 1 then
    groups.cancel_hopeless(run)
  end
  local dead =
    redis.call("ZRANGEBYSCORE", run.key.heartbeats, "-inf", text.int(run.now), "LIMIT", "0", text.int(4))
  local left = REAP
  for _, worker in ipairs(dead) do
    local names = M.claims(run, worker, left)
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
