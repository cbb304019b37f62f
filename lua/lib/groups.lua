-- Groups and their members: one JSON record per group. A group's place is not in its record, it is in
-- the slots; a record without a slot belongs to a batch that was taken.
--
--   { group, ordinal, v, since, drops, members = [ { state, token, v, attempt, failures, … } ] }
--
-- Member states: pending (to be issued), leased (worker, v), complete (v, reward, tokens, bytes) and
-- cancelled (a candidate that was not needed). `v` is the oldest weights version of the member's parts;
-- `reward` and `advantage` are text, so that they keep all their digits.
--
-- With `post_process`, a group whose members are all in gets a `judgement`: the claim on its post-processing,
-- issued, leased and released like a member, under the number 0.

local M = {}

local HOPELESS = 16 -- reservations cancelled in one call

-- A group's record, or nil.
function M.find(run, group)
  local record = redis.call("HGET", run.key.groups, text.int(group))
  return record and text.object(record) or nil
end

-- A group's record. Refuses a group that is gone (FENCED) or never was (NO_GROUP).
function M.read(run, group)
  local record = M.find(run, group)
  if record then
    return record
  end
  if group >= run.state.next_group then
    refuse.with("NO_GROUP", "group %d was never issued in this run", group)
  end
  refuse.with("FENCED", "group %d has left the run (trained, filtered or dropped); drop this work", group)
end

function M.write(run, record)
  redis.call("HSET", run.key.groups, text.int(record.group), text.json(record))
end

-- A new group for an ordinal, all members pending. `drops` and `attempt` count what was tried before, so
-- that a requeued prompt is sampled anew.
function M.create(run, ordinal, drops, attempt)
  local members = {}
  for m = 1, run.config.group_candidates do
    members[m] = { state = "pending", token = 0, attempt = attempt, failures = 0 }
  end
  return {
    group = context.next(run, "next_group"),
    ordinal = ordinal,
    drops = drops,
    since = run.now,
    members = members,
  }
end

-- A member of a group; 0 is its post-processing. Nil when there is none.
function M.part(record, m)
  return m == 0 and record.judgement or record.members[m]
end

-- The member that a claim names, leased or complete. Refuses a claim that is no longer held.
function M.claimed(record, member, token, worker)
  local found = M.part(record, member)
  local name = text.member(record.group, member)
  if not found and member == 0 then
    refuse.with("FENCED", "group %d is not being post-processed; drop this work", record.group)
  elseif not found then
    refuse.with("INVALID", "group %d has members 1 to %d, not %d", record.group, #record.members, member)
  elseif found.token ~= token then
    refuse.with(
      "FENCED",
      "the claim on %s was superseded (token %d, now %d); drop this work",
      name,
      token,
      found.token
    )
  elseif found.state == "pending" or found.state == "cancelled" then
    refuse.with("FENCED", "the claim on %s has ended (it is %s); drop this work", name, found.state)
  elseif found.worker ~= worker then
    refuse.with("FENCED", "%s is claimed by %s, not by %s", name, found.worker, worker)
  end
  return found
end

-- As `claimed`, for a claim that must still be running.
function M.running(record, member, token, worker)
  local found = M.claimed(record, member, token, worker)
  if found.state ~= "leased" then
    refuse.with("FENCED", "%s is already complete; drop this work", text.member(record.group, member))
  end
  return found
end

-- v_traj of the group: the oldest version of any part of it; nil while there is no part.
function M.oldest(record)
  local oldest
  for _, member in ipairs(record.members) do
    if member.v and member.state ~= "cancelled" and (not oldest or member.v < oldest) then
      oldest = member.v
    end
  end
  return oldest
end

-- Issue a pending member to a worker that serves weights `version`.
function M.issue(run, record, m, worker, version)
  local member = M.part(record, m)
  member.state = "leased"
  member.token = context.next(run, "next_token")
  member.attempt = member.attempt + 1
  member.worker = worker
  if m > 0 then
    member.v = math.min(member.v or version, version)
  end
  redis.call("ZADD", run.key.claims, "0", worker .. " " .. text.member(record.group, m))
end

-- The claim on a leased member, as its worker is told.
function M.claim(record, m, buffer, slot)
  local member = M.part(record, m)
  return {
    group = record.group,
    member = m,
    token = member.token,
    ordinal = record.ordinal,
    v_traj = record.v,
    buffer = buffer,
    slot = slot,
    attempt = member.attempt,
    worker = member.worker,
    prefix = member.prefix,
  }
end

-- Take a leased member off its worker's claims.
local function unclaim(run, record, m)
  redis.call("ZREM", run.key.claims, M.part(record, m).worker .. " " .. text.member(record.group, m))
end

-- Refuse data above the size limit.
function M.check_size(run, data)
  if #data > run.config.max_trajectory_bytes then
    refuse.with(
      "INVALID",
      "%d bytes are more than max_trajectory_bytes = %d allows; shorten the responses or raise it in a new run",
      #data,
      run.config.max_trajectory_bytes
    )
  end
end

-- A member is complete: keep its trajectory and end its claim.
function M.complete(run, record, args)
  local member, name = record.members[args.member], text.member(record.group, args.member)
  unclaim(run, record, args.member)
  if member.prefix then
    redis.call("HDEL", run.key.prefixes, name)
    member.prefix = nil
  end
  redis.call("HSET", run.key.payloads, name, args.payload)
  context.add(run, "payload_bytes", #args.payload)
  member.state = "complete"
  member.v, member.reward, member.tokens, member.bytes = args.oldest, args.reward, args.tokens, #args.payload
end

-- Keep the tokens of a running claim.
function M.keep_prefix(run, args, member)
  if args.member == 0 then
    refuse.with("INVALID", "a group's post-processing has no tokens to keep")
  end
  M.check_size(run, args.prefix)
  redis.call("HSET", run.key.prefixes, text.member(args.group, args.member), args.prefix)
  member.prefix = true
end

-- The post-processing of a group is done; `advantages` are those of its complete members, or nil.
function M.post_processed(run, record, advantages)
  unclaim(run, record, 0)
  record.judgement = nil
  local i = 0
  for _, member in ipairs(record.members) do
    if advantages and member.state == "complete" then
      i = i + 1
      member.advantage = advantages[i]
    end
  end
end

-- Queue a pending member for whoever asks next.
function M.queue(run, record, m)
  local place = text.int(context.next(run, "next_pending"))
  redis.call("ZADD", run.key.pending, place, text.member(record.group, m))
end

-- Make a leased member pending again. `failed` counts against max_attempts; a failed attempt is
-- regenerated from its start unless `keep` says that its saved tokens are good.
function M.reopen(run, record, m, failed, keep)
  local member, name = M.part(record, m), text.member(record.group, m)
  unclaim(run, record, m)
  if not keep and member.prefix then
    redis.call("HDEL", run.key.prefixes, name)
    member.prefix = nil
  end
  if not member.prefix then
    member.v = nil
  end
  if failed then
    member.failures = member.failures + 1
  end
  member.state, member.worker, member.reissue = "pending", nil, true
  M.queue(run, record, m)
end

-- Take a member from its worker, who is told, or from the queue.
local function cancel(run, record, m, reason)
  local member, name = M.part(record, m), text.member(record.group, m)
  if member.state == "leased" then
    unclaim(run, record, m)
    workers.tell_cancelled(run, member.worker, name, member.token, reason)
  elseif member.state == "pending" then
    redis.call("ZREM", run.key.pending, name)
  end
end

-- Cancel every member that is not complete, and the group's post-processing. Returns the members' numbers.
function M.cancel_open(run, record, reason)
  local cancelled = {}
  if record.judgement then
    cancel(run, record, 0, reason)
    record.judgement = nil
  end
  for m, member in ipairs(record.members) do
    local name = text.member(record.group, m)
    cancel(run, record, m, reason)
    if member.state ~= "complete" then
      if member.prefix then
        redis.call("HDEL", run.key.prefixes, name)
      end
      member.state, member.worker, member.prefix = "cancelled", nil, nil
      cancelled[#cancelled + 1] = m
    end
  end
  return cancelled
end

-- Delete a group's record and data. Its slot and claims must be gone.
function M.delete(run, record)
  local names, bytes = {}, 0
  for m, member in ipairs(record.members) do
    names[m] = text.member(record.group, m)
    bytes = bytes + (member.bytes or 0)
  end
  redis.call("HDEL", run.key.payloads, unpack(names))
  redis.call("HDEL", run.key.groups, text.int(record.group))
  context.add(run, "payload_bytes", -bytes)
end

local function attempts(record)
  local most = 0
  for _, member in ipairs(record.members) do
    most = math.max(most, member.attempt)
  end
  return most
end

-- Where the prompt of a retired group goes: each returns what became of it.
local fates = {
  requeue = function(run, record, reason)
    return supply.requeue(run, record.ordinal, record.drops + 1, attempts(record), reason)
  end,
  bury = function(run, record, reason)
    return supply.bury(run, record.ordinal, record.drops + 1, attempts(record), reason)
  end,
  discard = function(run)
    context.add(run, "discarded", 1)
    return "discarded"
  end,
  filter = function(run)
    context.add(run, "filtered", 1)
    return "filtered"
  end,
}

-- Take a live group out of the run; `fate` is one of the above, `by` who asked for it, if anybody did. Returns
-- what became of its prompt.
function M.retire(run, record, fate, reason, by)
  local kind, buffer, slot = slots.find(run, record.group)
  M.cancel_open(run, record, reason)
  placement.remove(run, record.group)
  M.delete(run, record)
  local outcome = fates[fate](run, record, reason)
  events.log(run, outcome, {
    group = record.group,
    ordinal = record.ordinal,
    from = kind .. " " .. text.place(buffer, slot),
    reason = reason,
    by = by,
  })
  events.signal(run, outcome)
  return outcome
end

-- With over-sampling: cancel Reserved groups for which every legal buffer is READY, a bounded number per
-- call; whoever calls next goes on.
function M.cancel_hopeless(run)
  local needing, last = run.state.frontier, context.last_buffer(run, run.state.version)
  while needing <= last and slots.is_ready(run, needing) do
    needing = needing + 1
  end
  local bound = needing > last and run.state.version + 1 or math.max(0, needing - run.config.eta)
  local hopeless = slots.reserved_before(run, bound, HOPELESS)
  for _, group in ipairs(hopeless) do
    M.retire(run, M.read(run, tonumber(group)), "discard", "surplus")
  end
  context.set(run, "sweeping", #hopeless == HOPELESS and 1 or 0)
end

-- Whether a member has failed as often as it may.
function M.out_of_attempts(run, record, m)
  return M.part(record, m).failures >= run.config.max_attempts
end

return M
