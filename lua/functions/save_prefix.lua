--[[
roq_save_prefix: save the tokens generated so far, for a re-issue to continue from. The claim
stays. Idempotent.

Arguments:
  group, member, token, worker   the claim
  prefix    msgpack of the tokens so far
Reply:    an empty object
Refusals:
  ROQ_FENCED   the claim was superseded; stop generating
  ROQ_NO_GROUP no such group was ever issued
  ROQ_INVALID  the prefix is too large, or of a claim that has none (member 0)
]]
transition.define({
  name = "save_prefix",
  arguments = { "group:integer", "member:integer", "token:integer", "worker:name", "prefix:bytes" },
  apply = function(run, args)
    local record = groups.read(run, args.group)
    local member = claims.running(record, args.member, args.token, args.worker)
    local first = not member.prefix
    claims.keep_prefix(run, args, member)
    if first then
      groups.write(run, record)
    end
    return {}
  end,
})
