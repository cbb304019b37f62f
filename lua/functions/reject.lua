--[[
roq_reject: take a finished group that cannot be trained out of the run, also from the batch in training
(Reject). That batch then goes back to its slots: the group's place is filled from later buffers or by new work,
and the trainer takes the batch again.

Arguments:
  request   identity of the call (lib/replies.lua)
  group     the group
  reason    human-readable
  by        who asked, human-readable
Reply:
  status    "requeued", "discarded" (on_drop) or "dead" (dropped too often)
Refusals:
  ROQ_FENCED, ROQ_NO_GROUP   it is not in the run
  ROQ_NOT_READY              it is unfinished (use drop), or was trained already
Events: returned, requeued, discarded, dead
]]

-- Put the batch in training back to the slots that it was taken from, if a group is in it.
local function give_back(run, group, args)
  local version = run.state.version
  local ids = run.state.frontier > version and batches.read(run, version) or {}
  local found = false
  for _, id in ipairs(ids) do
    found = found or tonumber(id) == group
  end
  if not found then
    refuse.with("NOT_READY", "group %d was trained already; nothing of it can be undone", group)
  end
  batches.write(run, version, {})
  context.set(run, "frontier", version)
  context.set(run, "stuck_since", nil)
  for slot, id in ipairs(ids) do
    slots.fill(run, "occupied", tonumber(id), nil, version, slot)
  end
  events.log(run, "returned", { version = version, groups = ids, reason = args.reason, by = args.by })
end

transition.define({
  name = "reject",
  arguments = { "request:text", "group:integer", "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    local record = groups.read(run, args.group)
    local kind = slots.find(run, args.group)
    if kind == "reserved" then
      refuse.with("NOT_READY", "group %d is unfinished; only finished groups are rejected", args.group)
    elseif not kind then
      give_back(run, args.group, args)
    end
    return { status = retire.group(run, record, run.config.on_drop, args.reason, args.by) }
  end,
})
