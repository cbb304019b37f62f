-- Whether the run makes progress: failed attempts, the pause when nothing but failures happens, and the end.

local M = {}

local function count(run, field)
  return run.state[field] or 0
end

-- A trajectory came in.
function M.completed(run)
  if not run.state.completed then
    context.set(run, "completed", 1)
    context.set(run, "in_vain", 0)
  end
end

-- A group was post-processed.
function M.judged(run)
  if not run.state.judged then
    context.set(run, "judged", 1)
    context.set(run, "in_vain", 0)
  end
end

-- An attempt failed, at a member or (member 0) at the post-processing of a group. When the first
-- `pause_after_failures` attempts have all failed, the cause is not the prompts: the run is paused, and hands
-- out nothing more until it is resumed.
function M.failed(run, member, reason)
  context.set(run, "failed", count(run, "failed") + 1)
  context.set(run, "last_failure", reason)
  if run.state[member == 0 and "judged" or "completed"] then
    return
  end
  context.set(run, "in_vain", count(run, "in_vain") + 1)
  local most = run.config.pause_after_failures
  if most and run.state.in_vain >= most and run.state.paused == 0 then
    context.set(run, "paused", 1)
    context.set(run, "failing", 1)
    events.log(run, "paused", {
      reason = string.format("the first %d attempts all failed (pause_after_failures)", run.state.in_vain),
      by = "roq",
    })
    events.signal(run, "pause")
  end
end

-- The run was resumed: the attempts so far are forgiven.
function M.resumed(run)
  context.set(run, "failing", 0)
  context.set(run, "in_vain", 0)
end

-- Why the run has ended: "total_steps", or "prompts_exhausted" when the prompts could not fill another batch.
function M.end_reason(run)
  if run.state.ended == 1 then
    local wanted = run.config.total_steps
    return wanted and run.state.version >= wanted and "total_steps" or "prompts_exhausted"
  end
end

-- Continue a run that has ended.
function M.reopen(run, reason, by)
  context.set(run, "ended", 0)
  events.log(run, "reopened", { reason = reason, by = by })
  events.signal(run, "reopened")
end

return M
