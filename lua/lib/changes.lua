-- Every write of a transition. Each notes how it is undone, so a transition that fails midway (the keys hold
-- what cannot be) leaves nothing behind. What no transition reads again is written at the end, by `commit`.

local M = {}

local undo, late -- commands: those that undo what is written, newest last; those to do at the end

-- Keys that are written without being read: their types are checked before the first of them is written.
local unread = {
  slots = "hash",
  payloads = "hash",
  prefixes = "hash",
  events = "stream",
  signals = "stream",
  ready = "stream",
}

function M.begin()
  undo, late = {}, {}
end

local function restore_field(key, field, old)
  if old then
    undo[#undo + 1] = { "HSET", key, field, old }
  else
    undo[#undo + 1] = { "HDEL", key, field }
  end
end

-- Set a field of a hash. `old` is its text, or false when it has none; left out, it is looked up.
function M.hset(key, field, value, old)
  if old == nil then
    old = redis.call("HGET", key, field)
  end
  redis.call("HSET", key, field, value)
  restore_field(key, field, old)
end

-- Delete a field of a hash; `old` as above.
function M.hdel(key, field, old)
  if old == nil then
    old = redis.call("HGET", key, field)
  end
  if old then
    redis.call("HDEL", key, field)
    restore_field(key, field, old)
  end
end

-- Set a member of a sorted set; returns its old score, or false.
function M.zadd(key, score, member)
  local old = redis.call("ZSCORE", key, member)
  redis.call("ZADD", key, score, member)
  undo[#undo + 1] = old and { "ZADD", key, old, member } or { "ZREM", key, member }
  return old
end

-- Add a member that a sorted set has not.
function M.zadd_new(key, score, member)
  if redis.call("ZADD", key, "NX", score, member) == 0 then
    refuse.damaged("%s has %s already", key, member)
  end
  undo[#undo + 1] = { "ZREM", key, member }
end

-- Remove a member of a sorted set; `score` is what it has, left out it is looked up.
function M.zrem(key, member, score)
  score = score or redis.call("ZSCORE", key, member)
  if score and redis.call("ZREM", key, member) == 1 then
    undo[#undo + 1] = { "ZADD", key, score, member }
  end
end

-- Remove the members between two names; all have the score 0.
function M.zrem_names(key, first, last)
  for _, member in ipairs(redis.call("ZRANGEBYLEX", key, first, last)) do
    undo[#undo + 1] = { "ZADD", key, "0", member }
  end
  redis.call("ZREMRANGEBYLEX", key, first, last)
end

-- Remove the members between two scores; returns them in order.
function M.zrem_scores(key, first, past)
  local flat, members = redis.call("ZRANGEBYSCORE", key, first, past, "WITHSCORES"), {}
  redis.call("ZREMRANGEBYSCORE", key, first, past)
  for i = 1, #flat, 2 do
    members[#members + 1] = flat[i]
    undo[#undo + 1] = { "ZADD", key, flat[i + 1], flat[i] }
  end
  return members
end

-- The first element of a list, taken off it; false when it is empty.
function M.lpop(key)
  local value = redis.call("LPOP", key)
  if value then
    undo[#undo + 1] = { "LPUSH", key, value }
  end
  return value
end

function M.rpush(key, value)
  redis.call("RPUSH", key, value)
  undo[#undo + 1] = { "RPOP", key }
end

-- Do a command at the end, after what can fail: for keys that no transition reads.
function M.later(command, key, ...)
  late[#late + 1] = { command, key, ... }
end

-- Refuse before the first of the late commands if one of them could fail.
local function check_late(key)
  local kinds = {}
  for name, kind in pairs(unread) do
    kinds[key[name]] = kind
  end
  for _, command in ipairs(late) do
    local name, kind = command[2], kinds[command[2]]
    if kind then
      kinds[name] = nil
      local found = redis.call("TYPE", name)["ok"]
      if found ~= kind and found ~= "none" then
        refuse.damaged("%s is a %s, not a %s", name, found, kind)
      end
      if name == key.signals or name == key.ready then
        local newest = redis.call("XREVRANGE", name, "+", "-", "COUNT", "1")[1]
        if
          newest and tonumber(string.match(newest[1], "^%d+")) >= tonumber(string.match(command[5], "^%d+"))
        then
          refuse.damaged("%s is ahead of the state", name)
        end
      end
    end
  end
end

-- Do the late commands, events first: of these only the first event can fail.
function M.commit(key)
  check_late(key)
  for _, events_first in ipairs({ true, false }) do
    for _, command in ipairs(late) do
      if (command[2] == key.events) == events_first then
        redis.call(unpack(command))
      end
    end
  end
end

function M.rollback()
  for i = #undo, 1, -1 do
    redis.call(unpack(undo[i]))
  end
end

return M
