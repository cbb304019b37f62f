--[[
roq_complete: hand in a finished trajectory. When it completes its group, the group takes its final kind
of place (Occupy with compaction), unless the zero-variance filter removes it or nothing needs it.

Arguments:
  request   identity of the call (lib/replies.lua)
  group, member, token, worker   the claim
  reward    the reward
  tokens    response tokens
  oldest, newest   oldest and newest weights version among its segments
  payload   msgpack of the trajectory (roq/trajectory.py)
Reply:
  status    "open" | "occupied" | "filtered" | "surplus"
  buffer, slot   the place, when it is occupied
  ready     the buffer that became READY by it
Refusals:
  ROQ_FENCED   the claim was superseded; drop the work
  ROQ_INVALID  a segment older than the claim or newer than what is published; too much data
Events: complete, occupy, filtered, discarded
]]

-- The answer for a group whose members are all in: where it is.
local function standing(run, record)
  local kind, buffer, slot = slots.find(run, record.group)
  if kind == "reserved" then
    return { status = "open" }
  end
  return { status = "occupied", buffer = buffer, slot = slot }
end

local function complete_members(record)
  local count, varied, first = 0, false, nil
  for _, member in ipairs(record.members) do
    if member.state == "complete" then
      count = count + 1
      first = first or member.reward
      varied = varied or member.reward ~= first
    end
  end
  return count, varied
end

local function occupy(run, record)
  groups.cancel_open(run, record, "group_complete")
  record.v = groups.oldest(record)
  local buffer, slot = placement.occupy(run, record.group, record.v)
  if not buffer then
    groups.delete(run, record)
    context.add(run, "discarded", 1)
    events.log(run, "discarded", { "group", record.group, "ordinal", record.ordinal, "reason", "surplus" })
    return { status = "surplus" }
  end
  groups.write(run, record)
  events.log(run, "occupy", {
    "group",
    record.group,
    "ordinal",
    record.ordinal,
    "at",
    text.place(buffer, slot),
    "v_traj",
    record.v,
  })
  local ready
  if slots.counts(run, buffer).occupied == run.config.batch_size then
    ready = buffer
    if run.config.buffer_slots > run.config.batch_size then
      groups.cancel_hopeless(run)
    end
  end
  return { status = "occupied", buffer = buffer, slot = slot, ready = ready }
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
    local record = groups.read(run, args.group)
    local member = groups.claimed(record, args.member, args.token, args.worker)
    if member.state == "complete" then
      return standing(run, record)
    end
    groups.check_size(run, args.payload)
    if args.oldest < member.v or args.newest > run.state.version then
      refuse.with(
        "INVALID",
        "segments of versions %d to %d cannot be: the claim is of version %d and %d is published",
        args.oldest,
        args.newest,
        member.v,
        run.state.version
      )
    end

    groups.finish(run, record, args)
    local count, varied = complete_members(record)
    events.log(run, "complete", {
      "group",
      args.group,
      "member",
      args.member,
      "worker",
      args.worker,
      "tokens",
      args.tokens,
      "reward",
      args.reward,
    })
    if run.config.max_inflight then
      events.signal(run, "inflight")
    end
    if count < run.config.group_size then
      groups.write(run, record)
      return { status = "open" }
    elseif run.config.filter_zero_variance == 1 and not varied then
      groups.retire(run, record, "filter", "zero_variance")
      return { status = "filtered" }
    end
    return occupy(run, record)
  end,
})
