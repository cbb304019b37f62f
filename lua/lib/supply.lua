-- The supply of prompts: requeued prompts, then ordinals in the run's order; and the dead letters.

local M = {}

-- The total number of ordinals; nil when the supply is endless.
local function total_of(run)
  if run.config.prompts and run.config.epochs then
    return run.config.prompts * run.config.epochs
  end
end

-- True if no prompt is left to admit.
function M.exhausted(run)
  local total = total_of(run)
  return total ~= nil and run.state.next_ordinal >= total and redis.call("LLEN", run.key.requeued) == 0
end

-- The next prompt: ordinal, earlier drops, earlier attempts. Call only when not exhausted.
function M.next(run)
  local requeued = changes.lpop(run.key.requeued)
  if requeued then
    local ordinal, drops, attempt = string.match(requeued, "^(%d+) (%d+) (%d+)$")
    return tonumber(ordinal), tonumber(drops), tonumber(attempt)
  end
  return context.next(run, "next_ordinal"), 0, 0
end

local function queue(run, ordinal, drops, attempt)
  changes.rpush(run.key.requeued, string.format("%.0f %.0f %.0f", ordinal, drops, attempt))
end

-- Make a prompt a dead letter. Returns "dead".
function M.bury(run, ordinal, drops, attempt, reason)
  local letter = { ordinal = ordinal, drops = drops, attempt = attempt, reason = reason, at = run.now }
  changes.hset(run.key.dead, text.int(ordinal), text.json(letter))
  return "dead"
end

-- Requeue a dead-lettered prompt; false when it is not one. Its attempt count continues, so that attempts
-- are sampled with other seeds; its drop count restarts.
function M.revive(run, ordinal)
  local letter = redis.call("HGET", run.key.dead, text.int(ordinal))
  if not letter then
    return false
  end
  changes.hdel(run.key.dead, text.int(ordinal), letter)
  queue(run, ordinal, 0, text.object(letter).attempt)
  return true
end

-- Requeue a prompt, or bury it if it was dropped too often. Returns "requeued" or "dead".
function M.requeue(run, ordinal, drops, attempt, reason)
  if drops >= run.config.max_attempts then
    return M.bury(run, ordinal, drops, attempt, reason)
  end
  queue(run, ordinal, drops, attempt)
  return "requeued"
end

return M
