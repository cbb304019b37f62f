--[[
roq_fail: an attempt failed. Its slot stays Reserved; another attempt starts from the prompt, unless the member has
failed as often as it may (max_attempts): then its prompt becomes a dead letter.

Arguments:
  request   identity of the call (lib/replies.lua)
  group, member, token, worker   the claim (member 0: the post-processing of a group)
  error     the error, human-readable
Reply:
  status    "pending", or "dead" when the attempts are used up
Refusals:
  ROQ_FENCED   the claim was superseded
  ROQ_NO_GROUP no such group was ever issued
Events: release, dead; paused, when the first attempts have all failed
]]
transition.define({
  name = "fail",
  arguments = {
    "request:text",
    "group:integer",
    "member:integer",
    "token:integer",
    "worker:name",
    "error:text",
  },
  frees = true,
  apply = function(run, args)
    local record = groups.read(run, args.group)
    claims.running(record, args.member, args.token, args.worker)
    workers.note_error(run, args.worker, args.error)
    events.log(
      run,
      "release",
      { group = args.group, member = args.member, worker = args.worker, failed = 1, reason = args.error }
    )
    progress.failed(run, args.member, args.error)
    local status = leases.reopen(run, record, args.member, true, false, args.error)
    events.signal(run, "release")
    return { status = status }
  end,
})
