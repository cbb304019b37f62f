-- The supply of prompts: ordinals in the run's order, requeued prompts first, and the dead letters.

local M = {}

-- Ordinals in all; nil when the supply is endless.
local function total_of(run)
  if run.config.prompts and run.config.epochs then
    return run.config.prompts * run.config.epochs
  end
end

-- Whether no prompt is left to admit.
function M.exhausted(run)
  local total = total_of(run)
  return total ~= nil and run.state.next_ordinal >= total and redis.call("LLEN", run.key.requeued) == 0
end

-- The next prompt: ordinal, drops and attempts before. Call only when not exhausted.
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

-- Make a prompt a dead letter, with the reason. Returns "dead".
function M.bury(run, ordinal, drops, attempt, reason)
  local letter = { ordinal = ordinal, drops = drops, attempt = attempt, reason = reason, at = run.now }
  changes.hset(run.key.dead, text.int(ordinal), text.json(letter))
  return "dead"
end

-- Put a dead-lettered prompt back; false when it is not one. Its attempts continue to count, so that they
-- are sampled anew; its drops start again.
function M.revive(run, ordinal)
  local letter = redis.call("HGET", run.key.dead, text.int(ordinal))
  if not letter then
    return false
  end
  changes.hdel(run.key.dead, text.int(ordinal), letter)
  queue(run, ordinal, 0, text.object(letter).attempt)
  return true
end

-- Put a prompt back, or bury it when it was dropped too often. Returns "requeued" or "dead".
function M.requeue(run, ordinal, drops, attempt, reason)
  if drops >= run.config.max_attempts then
    return M.bury(run, ordinal, drops, attempt, reason)
  end
  queue(run, ordinal, drops, attempt)
  return "requeued"
end

return M
