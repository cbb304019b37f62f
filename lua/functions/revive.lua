--[[
roq_revive: requeue a dead-lettered prompt: it is issued before any new one, with all its attempts. A run
that ended because its prompts were used up continues.

Arguments:
  request   identity of the call (lib/replies.lua)
  ordinal   number of the prompt
  reason    human-readable
  by        who asked, human-readable
Reply:
  status    "requeued"
Refusals:
  ROQ_NOT_READY  it is not a dead letter
  ROQ_ENDED      all steps are trained
Events: revived, reopened
]]
transition.define({
  name = "revive",
  arguments = { "request:text", "ordinal:integer", "reason:text", "by:text" },
  apply = function(run, args)
    local reason = progress.end_reason(run)
    if reason == "total_steps" then
      refuse.with(
        "ENDED",
        "all %d steps are trained; to continue, raise protocol.total_steps in the job file",
        run.state.version
      )
    end
    if not supply.revive(run, args.ordinal) then
      refuse.with("NOT_READY", "prompt %d is not a dead letter; `roq dead` lists them", args.ordinal)
    end
    events.log(run, "revived", { ordinal = args.ordinal, reason = args.reason, by = args.by })
    if reason then
      progress.reopen(run, "a dead letter was put back", args.by)
    end
    events.signal(run, "revived")
    return { status = "requeued" }
  end,
})
