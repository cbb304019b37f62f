--[[
roq_release: give a claim back unfinished. Its slot stays Reserved; another worker generates the
trajectory anew, or continues from the prefix.

Arguments:
  request   identity of the call (lib/replies.lua)
  group, member, token, worker   the claim (member 0: the post-processing of a group)
  failed    1 when the attempt failed (counts against max_attempts, starts clean), 0 for a detach
  reason    why, for people; the error when it failed
  prefix    msgpack of the tokens so far; "" keeps what was saved before
Reply:
  status    "pending", or "dead" when the attempts are used up
Refusals:
  ROQ_FENCED   the claim was superseded
  ROQ_NO_GROUP no such group was ever issued
  ROQ_INVALID  the prefix is too large, or of a claim that has none (member 0)
Events: release, dead
]]
transition.define({
  name = "release",
  arguments = {
    "request:text",
    "group:integer",
    "member:integer",
    "token:integer",
    "worker:name",
    "failed:integer",
    "reason:text",
    "prefix:bytes",
  },
  frees = true,
  apply = function(run, args)
    local record = groups.read(run, args.group)
    local member = groups.running(record, args.member, args.token, args.worker)
    local failed = args.failed == 1
    if args.prefix ~= "" and not failed then
      groups.keep_prefix(run, args, member)
    end
    if failed then
      workers.note_error(run, args.worker, args.reason)
    end
    events.log(run, "release", {
      "group",
      args.group,
      "member",
      args.member,
      "worker",
      args.worker,
      "failed",
      args.failed,
      "reason",
      args.reason,
    })
    local status = workers.reopen(run, record, args.member, failed, not failed, args.reason)
    events.signal(run, "release")
    return { status = status }
  end,
})
