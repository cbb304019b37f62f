--[[
roq_revive: put a dead-lettered prompt back: it is issued again before any new one, with all its attempts.

Arguments:
  request   identity of the call (lib/replies.lua)
  ordinal   which
  reason    why, for people
  by        who asked, for people
Reply:
  status    "requeued"
Refusals:
  ROQ_NOT_READY  it is not a dead letter
  ROQ_ENDED      the run is over
Events: revived
]]
transition.define({
  name = "revive",
  arguments = { "request:text", "ordinal:integer", "reason:text", "by:text" },
  apply = function(run, args)
    if run.state.ended == 1 then
      refuse.with("ENDED", "the run is over after %d updates; nothing is issued any more", run.state.version)
    end
    if not supply.revive(run, args.ordinal) then
      refuse.with("NOT_READY", "prompt %d is not a dead letter; `roq dead` lists them", args.ordinal)
    end
    events.log(run, "revived", { ordinal = args.ordinal, reason = args.reason, by = args.by })
    events.signal(run, "revived")
    return { status = "requeued" }
  end,
})
