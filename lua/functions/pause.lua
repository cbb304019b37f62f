--[[
roq_pause: stop the admission of new prompts. Work in flight continues. Idempotent.

Arguments:
  reason    human-readable
  by        who asked, human-readable
Reply:    an empty object
Events: paused
]]
transition.define({
  name = "pause",
  arguments = { "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    if run.state.paused == 0 then
      context.set(run, "paused", 1)
      events.log(run, "paused", { reason = args.reason, by = args.by })
      events.signal(run, "pause")
    end
    return {}
  end,
})
