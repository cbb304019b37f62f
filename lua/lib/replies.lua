-- Exactly-once effect for retried calls, as in NFSv4.1 sessions (RFC 8881, 2.10.6): a client numbers
-- its calls on a few lanes, one call at a time on each. The last reply of a lane is stored, so a call whose
-- reply was lost is answered again without a second effect; the lane's next call overwrites it.

local M = {}

local LANES = 128 -- half of them for batches of calls
local CLIENTS = 4096 -- the least recently used client beyond this is forgotten
local REMEMBERED_MS = 24 * 3600 * 1000

-- Forget clients that are long gone, a few per call.
local function forget(run)
  local gone =
    redis.call("ZRANGEBYSCORE", run.key.clients, "-inf", text.int(run.now - REMEMBERED_MS), "LIMIT", "0", "4")
  if redis.call("ZCARD", run.key.clients) > CLIENTS then
    gone[#gone + 1] = redis.call("ZRANGE", run.key.clients, "0", "0")[1]
  end
  for _, client in ipairs(gone) do
    local lanes = {}
    for lane = 1, LANES do
      lanes[lane] = client .. ":" .. lane
    end
    changes.later("HDEL", run.key.replies, unpack(lanes))
    changes.zrem(run.key.clients, client)
  end
end

-- The stored reply if this call was made before. `request` is "client lane sequence", or "" for a
-- call without this guarantee (typed by hand, for example).
function M.recall(run, request)
  if request == "" then
    return nil
  end
  local client, lane, sequence = string.match(request, "^([%w%-]+) (%d+) (%d+)$")
  if not client or tonumber(lane) < 1 or tonumber(lane) > LANES then
    refuse.with("INVALID", "the request identity must be 'client lane sequence' with lanes 1 to %d", LANES)
  end
  run.request = { client = client, lane = client .. ":" .. lane, sequence = tonumber(sequence) }
  local kept = redis.call("HGET", run.key.replies, run.request.lane)
  if kept then
    local kept_sequence, reply = string.match(kept, "^(%d+) (.*)$")
    if tonumber(kept_sequence) == run.request.sequence then
      return reply
    elseif tonumber(kept_sequence) > run.request.sequence then
      refuse.with("FENCED", "this call was overtaken by a later one of the same client; nothing was done")
    end
  end
end

-- Store the reply to this call.
function M.keep(run, reply)
  if run.request then
    changes.later("HSET", run.key.replies, run.request.lane, text.int(run.request.sequence) .. " " .. reply)
    if not changes.zadd(run.key.clients, text.int(run.now), run.request.client) then
      forget(run)
    end
  end
end

return M
