-- How a function of the library is declared. A transition validates, writes, and returns its reply as a
-- table; refusals (lib/refuse.lua) become error replies; a retried call gets its first reply again.

local M = {}

local function guarded(work)
  return function(keys, argv)
    local ok, result = pcall(work, keys, argv)
    if ok then
      return result
    end
    if type(result) == "table" and result.refusal then
      return redis.error_reply(result.refusal)
    end
    error(result)
  end
end

-- Register a transition that writes.
--   name       without the prefix roq_
--   arguments  see lib/arguments.lua; with "request:text" first, a retry has one effect
--   frees      true when it must work on a full server, because it frees memory or keeps leases alive
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
