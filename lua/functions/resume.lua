--[[
roq_resume: admit new prompts again, after roq_pause. Idempotent.

Arguments:
  reason    human-readable
  by        who asked, human-readable
Reply:    an empty object
Events: resumed
]]
transition.define({
  name = "resume",
  arguments = { "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    if run.state.paused == 1 then
      context.set(run, "paused", 0)
      progress.resumed(run)
      events.log(run, "resumed", { reason = args.reason, by = args.by })
      events.signal(run, "resume")
    end
    return {}
  end,
})
