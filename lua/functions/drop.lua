--[[
roq_drop: remove an unfinished group from the run (Drop). Its Reserved slot is freed, its claims are
cancelled, Occupied groups are pulled forward.

Arguments:
  request   identity of the call (lib/replies.lua)
  group     number of the group
  reason    human-readable
  by        who asked, human-readable
Reply:
  status    "requeued", "discarded" (on_drop) or "dead" (dropped too often)
Refusals:
  ROQ_FENCED, ROQ_NO_GROUP   it is not in the run
  ROQ_NOT_READY              it is finished; use filter
Events: requeued, discarded, dead
]]
transition.define({
  name = "drop",
  arguments = { "request:text", "group:integer", "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    local record = groups.read(run, args.group)
    local kind = slots.find(run, args.group)
    if kind ~= "reserved" then
      refuse.with(
        "NOT_READY",
        "group %d is %s; only unfinished groups are dropped",
        args.group,
        kind and "finished" or "in a batch that was taken"
      )
    end
    return { status = retire.group(run, record, run.config.on_drop, args.reason, args.by) }
  end,
})
