--[[
roq_reserve: issue work (Reserve). Pending members come first; then new prompts
are admitted, each to the latest legal Empty slot.

Arguments:
  request   identity of the call (lib/replies.lua)
  worker    the worker's name; its lease is extended
  version   weights version that its engine has loaded
  limit     trajectories that its engine can take now
Reply: at most 32 claims; fewer than asked for without a refusal means that there are more
  reservations  claims: group, member, token, ordinal, v_traj, buffer, slot, attempt, worker, and
                prefix = true when there are saved tokens (the client reads them from `prefixes`)
  refused       why there are fewer than asked for (RefusalReason in roq/types.py); absent otherwise
  version, signal, ended
Refusals:
  ROQ_STATE_LOST  the worker's version is newer than the published one
Events: reserve (a new group), issue (pending members), reissue (pending members of an earlier attempt),
        expired, worker_joined, worker_lost
]]
local MOST = 32 -- claims in one call; the client asks again for the rest
local PASSED = 16 -- pending members that may be skipped because these weights are too old for them

-- Lease pending members of a group until `room` is used up; returns the rest of it. `waited` is true when
-- they are in the queue.
local function lease(run, out, record, worker, version, room, waited)
  local _, buffer, slot = slots.find(run, record.group)
  local given, what = {}, waited and "issue" or "reserve"
  for m = 0, #record.members do
    local member = groups.part(record, m)
    if room > 0 and member and member.state == "pending" then
      if waited then
        changes.zrem(run.key.pending, text.member(record.group, m))
        what = member.reissue and "reissue" or what
      end
      claims.issue(run, record, m, worker, version)
      given[#given + 1] = m
      room = room - 1
    end
  end
  local v_traj = groups.oldest(record)
  if v_traj ~= record.v then
    record.v = v_traj
    slots.reindex(run, record.group, v_traj, buffer, slot)
  end
  groups.write(run, record)
  for _, m in ipairs(given) do
    out[#out + 1] = claims.reply(record, m, buffer, slot)
  end
  events.log(run, what, {
    group = record.group,
    ordinal = record.ordinal,
    members = given,
    at = text.place(buffer, slot),
    v_traj = record.v,
    worker = worker,
  })
  return room
end

-- Issue pending members, the oldest first, where the group's slot stays legal with these weights.
local function reissue(run, out, args, room)
  local seen = {}
  local waiting = redis.call("ZRANGE", run.key.pending, "0", text.int(room + PASSED - 1))
  for _, name in ipairs(waiting) do
    if room == 0 then
      break
    end
    local group = text.parse_member(name)
    if not seen[group] then
      seen[group] = true
      local record = groups.known(run, group)
      local _, buffer = slots.find(run, group)
      if not buffer then
        refuse.damaged("group %.0f waits to be issued but is in no slot", group)
      elseif record.judgement or buffer <= args.version + run.config.eta then
        room = lease(run, out, record, args.worker, args.version, room, true)
      end
    end
  end
  return room
end

-- True if the byte budget stops admission. While the trainer waits it never stops what a batch needs: only
-- trained and checkpointed batches free bytes, so a run that cannot fill one could never continue.
local function over_budget(run)
  local limit = run.config.max_payload_bytes
  if not limit or run.state.payload_bytes < limit then
    return false
  end
  if not run.state.trainer_seen or run.state.frontier > run.state.version then
    return true
  end
  local live = redis.call("ZCARD", run.key.reserved) + redis.call("ZCARD", run.key.occupied)
  return live >= run.config.batch_size
end

-- Why no new prompt can be admitted now, or nil.
local function obstacle(run, args)
  local config, state = run.config, run.state
  if state.paused == 1 then
    return "paused"
  elseif supply.exhausted(run) or (config.total_steps and state.frontier >= config.total_steps) then
    return "exhausted"
  elseif args.version + config.eta < state.frontier then
    return "worker_stale"
  elseif over_budget(run) then
    return "bytes"
  end
end

-- Admit new prompts; returns why it stopped, or nil when `room` is used up.
local function admit(run, out, args, room)
  while room > 0 do
    local why = obstacle(run, args)
    if why then
      return why
    end
    local buffer, slot = placement.latest_empty(run, args.version)
    if not buffer then
      return "window_full"
    end
    local record = groups.create(run, supply.next(run))
    record.v = args.version
    slots.fill(run, "reserved", record.group, record.v, buffer, slot)
    room = lease(run, out, record, args.worker, args.version, room, false)
    for m, member in ipairs(record.members) do
      if member.state == "pending" then
        claims.queue(run, record, m)
        events.signal(run, "members")
      end
    end
  end
end

transition.define({
  name = "reserve",
  arguments = { "request:text", "worker:name", "version:integer", "limit:integer" },
  apply = function(run, args)
    if args.version > run.state.version then
      refuse.with(
        "STATE_LOST",
        "worker %s says it serves version %d but only %d is published",
        args.worker,
        args.version,
        run.state.version
      )
    end
    local out, refused = {}
    if run.state.ended == 1 then
      refused = "exhausted"
    elseif leases.touch(run, args.worker).draining then
      refused = "draining"
    elseif run.state.failing == 1 then
      refused = "paused" -- nor are prompts that were admitted tried again
    else
      local more = leases.maintain(run)
      local asked = math.min(args.limit, MOST)
      local room = asked
      if run.config.max_inflight then
        room = math.min(room, math.max(0, run.config.max_inflight - redis.call("ZCARD", run.key.claims)))
      end
      local capped = room < asked
      room = reissue(run, out, args, room)
      refused = admit(run, out, args, room)
      if capped and not refused then
        refused = "inflight_cap"
      elseif more and #out > 0 then
        refused = nil
      end
    end
    return {
      reservations = text.array(out),
      refused = refused,
      version = run.state.version,
      signal = run.state.signal,
      ended = run.state.ended == 1,
    }
  end,
})
