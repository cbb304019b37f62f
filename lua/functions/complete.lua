--[[
roq_complete: hand in a finished trajectory. When it completes its group, the group becomes Occupied
(Occupy with compaction), unless the zero-variance filter removes it, it is post-processed first
(post_process), or no buffer needs it.

Arguments:
  request   identity of the call (lib/replies.lua)
  group, member, token, worker   the claim
  reward    the reward
  tokens    number of response tokens
  oldest, newest   oldest and newest weights version among its segments
  payload   msgpack of the trajectory (roq/trajectory.py)
Reply:
  status    "open" | "occupied" | "filtered" | "surplus" | "judging"
  buffer, slot   its slot, when it is occupied
  ready     the buffer that became READY
  judgement when it is judging: the caller's claim on the group's post-processing (roq_judge)
Refusals:
  ROQ_FENCED   the claim was superseded; drop the work
  ROQ_NO_GROUP no such group was ever issued
  ROQ_INVALID  a segment older than the claim or newer than what is published; too much data, or none that could
               be a trajectory; a reward beyond what can be trained
Events: complete, cancelled, judging, occupy, filtered, discarded
]]

-- The reply for a member that is already complete: the state of its group.
local function standing(run, record, worker)
  local kind, buffer, slot = slots.find(run, record.group)
  local judgement = record.judgement
  if judgement and judgement.state == "leased" and judgement.worker == worker then
    return { status = "judging", judgement = claims.reply(record, 0, buffer, slot) }
  elseif kind == "reserved" then
    return { status = "open" }
  end
  return { status = "occupied", buffer = buffer, slot = slot }
end

-- What can be told of a trajectory by its bytes (roq/trajectory.py): a msgpack map with at least a token id and a
-- log-prob, of 4 bytes each, for every token.
local function check_payload(args)
  local first = string.byte(args.payload) or 0
  if (first < 0x80 or first > 0x8f) and first ~= 0xde and first ~= 0xdf then
    refuse.with("INVALID", "the payload is no trajectory: not a msgpack map")
  elseif args.tokens < 1 or args.tokens * 8 > #args.payload then
    refuse.with("INVALID", "%.0f tokens cannot be in a payload of %d bytes", args.tokens, #args.payload)
  elseif math.abs(tonumber(args.reward)) > arguments.LARGEST_REWARD then
    refuse.with("INVALID", "the reward %s is larger than 1e9; scale rewards down", args.reward)
  end
end

transition.define({
  name = "complete",
  arguments = {
    "request:text",
    "group:integer",
    "member:integer",
    "token:integer",
    "worker:name",
    "reward:float",
    "tokens:integer",
    "oldest:integer",
    "newest:integer",
    "payload:bytes",
  },
  apply = function(run, args)
    if args.member == 0 then
      refuse.with("INVALID", "member 0 is a group's post-processing; hand it in with judge")
    end
    local record = groups.read(run, args.group)
    local member = claims.claimed(record, args.member, args.token, args.worker)
    if member.state == "complete" then
      return standing(run, record, args.worker)
    end
    claims.check_size(run, args.payload)
    check_payload(args)
    if args.oldest < member.v or args.newest < args.oldest or args.newest > run.state.version then
      refuse.with(
        "INVALID",
        "segments of versions %d to %d cannot be: the claim is of version %d and %d is published",
        args.oldest,
        args.newest,
        member.v,
        run.state.version
      )
    end

    claims.complete(run, record, args)
    progress.completed(run)
    events.log(run, "complete", {
      group = args.group,
      member = args.member,
      worker = args.worker,
      tokens = args.tokens,
      reward = args.reward,
    })
    if run.config.max_inflight then
      events.signal(run, "inflight")
    end
    return judging.advance(run, record, args.worker)
  end,
})
