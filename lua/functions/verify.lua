--[[
roq_verify: a consistent snapshot of all keys that the invariants cover. The client checks it
(roq/protocol/invariants.py); checking here would block the server for longer.

Arguments: none
Reply:     a flat list of name, content pairs: hashes as HGETALL, sorted sets as ZRANGE WITHSCORES,
           payloads and prefixes as field names, the requeued list unchanged
]]
local hashes =
  { "config", "state", "slots", "groups", "workers", "pins", "dead", "batches", "weights", "sender" }
local sorted = {
  "reserved",
  "occupied",
  "reserved_by_version",
  "claims",
  "pending",
  "heartbeats",
  "cancelled",
  "departed",
}

transition.plain({
  name = "verify",
  arguments = {},
  reads = true,
  apply = function(keys)
    local key = context.open(keys).key
    local out = {}
    local function add(name, content)
      out[#out + 1] = name
      out[#out + 1] = content
    end
    for _, name in ipairs(hashes) do
      add(name, redis.call("HGETALL", key[name]))
    end
    for _, name in ipairs(sorted) do
      add(name, redis.call("ZRANGE", key[name], "0", "-1", "WITHSCORES"))
    end
    for _, name in ipairs({ "payloads", "prefixes" }) do
      add(name, redis.call("HKEYS", key[name]))
    end
    add("requeued", redis.call("LRANGE", key.requeued, "0", "-1"))
    return out
  end,
})
