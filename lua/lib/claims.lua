-- Claims: a worker's lease of a member of a group, or of its post-processing (member 0). Issued to a
-- worker under a new token, then completed, made pending again, or cancelled.

local M = {}

-- The member of a claim, leased or complete. Refuses a claim that is no longer held.
function M.claimed(record, member, token, worker)
  local found = groups.part(record, member)
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

-- As `claimed`, but refuses a complete member.
function M.running(record, member, token, worker)
  local found = M.claimed(record, member, token, worker)
  if found.state ~= "leased" then
    refuse.with("FENCED", "%s is already complete; drop this work", text.member(record.group, member))
  end
  return found
end

-- Queue a pending member for the next worker that asks.
function M.queue(run, record, m)
  local place = text.int(context.next(run, "next_pending"))
  changes.zadd(run.key.pending, place, text.member(record.group, m))
end

-- Issue a pending member to a worker with weights `version`.
function M.issue(run, record, m, worker, version)
  local member = groups.part(record, m)
  member.state = "leased"
  member.token = context.next(run, "next_token")
  member.attempt = member.attempt + 1
  member.worker = worker
  if m > 0 then
    member.v = math.min(member.v or version, version)
  end
  changes.zadd(run.key.claims, "0", worker .. " " .. text.member(record.group, m))
end

-- The reply for the claim on a leased member.
function M.reply(record, m, buffer, slot)
  local member = groups.part(record, m)
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

-- Remove a leased member from its worker's claims.
local function unclaim(run, record, m)
  local name = text.member(record.group, m)
  changes.zrem(run.key.claims, groups.part(record, m).worker .. " " .. name, "0")
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

-- Complete a member: store its trajectory and end its claim.
function M.complete(run, record, args)
  local member, name = record.members[args.member], text.member(record.group, args.member)
  unclaim(run, record, args.member)
  if member.prefix then
    changes.later("HDEL", run.key.prefixes, name)
    member.prefix = nil
  end
  changes.later("HSET", run.key.payloads, name, args.payload)
  context.add(run, "payload_bytes", #args.payload)
  member.state = "complete"
  member.v, member.reward, member.tokens, member.bytes = args.oldest, args.reward, args.tokens, #args.payload
end

-- Save the tokens of a running claim.
function M.keep_prefix(run, args, member)
  if args.member == 0 then
    refuse.with("INVALID", "a group's post-processing has no tokens to keep")
  end
  M.check_size(run, args.prefix)
  changes.later("HSET", run.key.prefixes, text.member(args.group, args.member), args.prefix)
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

-- Make a leased member pending again. `failed` counts against max_attempts; a failed attempt is
-- regenerated from its start unless `keep` says that its saved tokens are good.
function M.reopen(run, record, m, failed, keep)
  local member, name = groups.part(record, m), text.member(record.group, m)
  unclaim(run, record, m)
  if not keep and member.prefix then
    changes.later("HDEL", run.key.prefixes, name)
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

-- True if a member has no attempts left.
function M.out_of_attempts(run, record, m)
  return groups.part(record, m).failures >= run.config.max_attempts
end

-- Take a member from its worker, with a cancellation, or from the queue.
local function cancel(run, record, m, reason)
  local member, name = groups.part(record, m), text.member(record.group, m)
  if member.state == "leased" then
    unclaim(run, record, m)
    cancellations.tell(run, member.worker, name, member.token, reason)
  elseif member.state == "pending" then
    changes.zrem(run.key.pending, name)
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
        changes.later("HDEL", run.key.prefixes, name)
      end
      member.state, member.worker, member.prefix = "cancelled", nil, nil
      cancelled[#cancelled + 1] = m
    end
  end
  return cancelled
end

-- Claims of a worker, at most `limit`: members' names.
function M.names_of(run, worker, limit)
  local first, last = text.entries_of(worker)
  local names = redis.call("ZRANGEBYLEX", run.key.claims, first, last, "LIMIT", "0", text.int(limit))
  for i, name in ipairs(names) do
    names[i] = string.sub(name, #worker + 2)
  end
  return names
end

function M.count(run, worker)
  return redis.call("ZLEXCOUNT", run.key.claims, text.entries_of(worker))
end

return M
