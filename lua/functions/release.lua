--[[
roq_release: give a claim back unfinished. Its slot stays Reserved; another worker generates the
trajectory again, or continues from the prefix.

Arguments:
  request   identity of the call (lib/replies.lua)
  group, member, token, worker   the claim (member 0: the post-processing of a group)
  reason    human-readable
  prefix    msgpack of the tokens so far; "" keeps the saved one
Reply:
  status    "pending"
Refusals:
  ROQ_FENCED   the claim was superseded
  ROQ_NO_GROUP no such group was ever issued
  ROQ_INVALID  the prefix is too large, or of a claim that has none (member 0)
Events: release
]]
transition.define({
  name = "release",
  arguments = {
    "request:text",
    "group:integer",
    "member:integer",
    "token:integer",
    "worker:name",
    "reason:text",
    "prefix:bytes",
  },
  frees = true,
  apply = function(run, args)
    local record = groups.read(run, args.group)
    local member = claims.running(record, args.member, args.token, args.worker)
    if args.prefix ~= "" then
      claims.keep_prefix(run, args, member)
    end
    events.log(
      run,
      "release",
      { group = args.group, member = args.member, worker = args.worker, reason = args.reason }
    )
    local status = leases.reopen(run, record, args.member, false, true, args.reason)
    events.signal(run, "release")
    return { status = status }
  end,
})
