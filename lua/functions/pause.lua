--[[
roq_pause: stop or resume the admission of new prompts. What is admitted goes on. Harmless to repeat.

Arguments:
  paused    1 stops, 0 resumes
  reason    why, for people
  by        who asked, for people
Reply:
  paused
Events: paused, resumed
]]
transition.define({
  name = "pause",
  arguments = { "paused:integer", "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    local paused = args.paused
    if paused > 1 then
      refuse.with("INVALID", "paused must be 1 (stop) or 0 (resume), not %d", paused)
    end
    if paused ~= run.state.paused then
      context.set(run, "paused", paused)
      local what = paused == 1 and "paused" or "resumed"
      events.log(run, what, { "reason", args.reason, "by", args.by })
      events.signal(run, "pause")
    end
    return { paused = paused == 1 }
  end,
})
