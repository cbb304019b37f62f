--[[
roq_filter: remove a finished group from the run (Filter): it has no gradient or bad data. The last
Occupied of its buffer takes its place, later Occupied groups are pulled forward.

Arguments:
  request   identity of the call (lib/replies.lua)
  group     number of the group
  reason    human-readable
  by        who asked, human-readable
Reply:
  status    "filtered"
Refusals:
  ROQ_FENCED, ROQ_NO_GROUP   it is not in the run
  ROQ_NOT_READY              it is unfinished (use drop) or in training
Events: filtered
]]
transition.define({
  name = "filter",
  arguments = { "request:text", "group:integer", "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    local record = groups.read(run, args.group)
    local kind = slots.find(run, args.group)
    if kind ~= "occupied" then
      refuse.with(
        "NOT_READY",
        "group %d is %s; only finished groups that no trainer has taken are filtered",
        args.group,
        kind and "unfinished" or "in a batch that was taken"
      )
    end
    return { status = retire.group(run, record, "filter", args.reason, args.by) }
  end,
})
