-- Declare functions of the library. A transition validates, writes, and returns its reply as a
-- table; refusals (lib/refuse.lua) become error replies, and nothing that was written before one stays
-- (lib/changes.lua); a retried call gets its first reply again.

local M = {}

-- A failure that no client can help: what the keys hold does not fit together. Others (the server's own, such
-- as MISCONF) are as the server words them.
local function as_damage(failure)
  local said = type(failure) == "table" and failure.err or tostring(failure)
  local coded = string.match(said, "^[A-Z]+ ")
  if coded and coded ~= "WRONGTYPE " and not string.match(said, "^ERR The stream ") then
    error(failure)
  end
  return select(2, pcall(refuse.damaged, "%s", said)).refusal
end

local function guarded(work)
  return function(keys, argv)
    changes.begin()
    local ok, result = pcall(work, keys, argv)
    if ok then
      return result
    end
    changes.rollback()
    return redis.error_reply(type(result) == "table" and result.refusal or as_damage(result))
  end
end

-- Register a transition that writes.
--   name       without the prefix roq_
--   arguments  see lib/arguments.lua; with "request:text" first, a retry has one effect
--   frees      true if it must work on a full server, because it frees memory, keeps leases alive, or
--              pauses, resumes or drains
--   apply      function(run, args) -> reply, a table or JSON text
function M.define(spec)
  local once = spec.arguments[1] == "request:text"
  redis.register_function({
    function_name = "roq_" .. spec.name,
    flags = spec.frees and { "allow-oom" } or {},
    callback = guarded(function(keys, argv)
      local args = arguments.read(spec.arguments, argv)
      local run = context.open(keys)
      local reply = once and replies.recall(run, args.request)
      if reply then
        return reply
      end
      reply = spec.apply(run, args)
      if type(reply) == "table" then
        reply = text.json(reply)
      end
      if once then
        replies.keep(run, reply)
      end
      context.commit(run)
      return reply
    end),
  })
end

-- Register a function that only reads, or that works without an open run. `apply` gets keys and args.
function M.plain(spec)
  redis.register_function({
    function_name = "roq_" .. spec.name,
    flags = spec.reads and { "no-writes" } or {},
    callback = guarded(function(keys, argv)
      return spec.apply(keys, arguments.read(spec.arguments, argv))
    end),
  })
end

return M
