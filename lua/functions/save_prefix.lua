--[[
roq_save_prefix: keep the tokens generated so far, so that a re-issue continues from them. The claim
stays. Harmless to repeat.

Arguments:
  group, member, token, worker   the claim
  prefix    msgpack of the tokens so far
Reply:    nothing of note
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
