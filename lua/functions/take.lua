--[[
roq_take: the trainer asks for its next batch (Take). Taking again before publishing returns the same
batch; a trainer that restarts from an older checkpoint gets the later batches again, unchanged.

Arguments:
  trainer   the trainer's name; a new name takes over, and the old one is fenced
  version   number of updates in the trainer's weights; "" is the published version
Reply:
  ready     true if there is a batch
  version, replay, groups   the batch; `groups` are the groups' numbers in slot order
Refusals:
  ROQ_FENCED      another trainer has taken over
  ROQ_ENDED       all steps are trained, or the prompts cannot fill another batch
  ROQ_STATE_LOST  the trainer is ahead of the published version, or the batch was freed already
Events: take, trainer_joined, ended, and those of dropped groups and expired leases
]]
local DROPPED = 16 -- groups dropped by the stuck timeout in one call
local DROP_LOOK = 64 -- groups examined for it
local LEFTOVER = 64 -- Reserved groups read with one command when a buffer is taken

-- The reply with a batch: the groups' numbers, not their records, which no longer change: the client reads
-- them in parts (`groups`), without blocking the server.
local function batch_reply(run, version, ids)
  return { ready = true, version = version, replay = version < run.state.version, groups = ids }
end

-- With over-sampling: Reserved groups left in a buffer that is taken move to a later legal Empty slot, or are
-- discarded. All of them in this call, at most S - B, since the buffer is gone afterwards.
local function clear_reserved(run, buffer)
  for _ = 0, run.config.buffer_slots / LEFTOVER + 1 do
    local left = slots.list(run, "reserved", buffer, LEFTOVER)
    for _, id in ipairs(left) do
      local group = tonumber(id)
      local _, from, slot = slots.find(run, group)
      local v_traj = slots.version_of(run, group)
      local to
      for later = context.last_buffer(run, v_traj), buffer + 1, -1 do
        if slots.has_empty(run, later) then
          to = later
          break
        end
      end
      if to then
        slots.move(run, "reserved", group, v_traj, from, slot, to, slots.last_empty(run, to))
      else
        retire.group(run, groups.known(run, group), "discard", "surplus")
      end
    end
    if #left == 0 then
      return
    end
  end
end

local function reset_timeout(run)
  context.set(run, "stuck_since", nil)
  context.set(run, "dropping_since", nil)
end

-- Drop the Reserved groups of a buffer that has been FULL for too long while the trainer waits: those that
-- were there at the timeout, a bounded number per call.
local function drop_after_timeout(run, buffer)
  local state, timeout = run.state, run.config.stuck_timeout_ms
  if not timeout then
    return
  end
  if not state.dropping_since then
    if placement.buffer_state(run, buffer) ~= "FULL" then
      context.set(run, "stuck_since", nil)
    elseif not state.stuck_since then
      context.set(run, "stuck_since", run.now)
    elseif run.now - state.stuck_since >= timeout then
      context.set(run, "dropping_since", run.now)
    end
  end
  if not state.dropping_since then
    return
  end
  local dropped = 0
  for _, id in ipairs(slots.list(run, "reserved", buffer, DROP_LOOK)) do
    local record = groups.known(run, tonumber(id))
    if dropped < DROPPED and record.since <= state.dropping_since then
      retire.group(run, record, run.config.on_drop, "stuck_timeout")
      dropped = dropped + 1
    end
  end
  if dropped == 0 then
    reset_timeout(run)
  end
end

-- True if the frontier's buffer can never fill: no prompt is left and nothing is being generated.
local function starved(run)
  return supply.exhausted(run) and redis.call("ZCARD", run.key.reserved) == 0
end

local function check(run, version)
  local state = run.state
  if version > state.version then
    refuse.with(
      "STATE_LOST",
      "the trainer has %d updates but the server knows of %d: Redis lost acknowledged writes; restore its "
        .. "append-only file, or restart the trainer from checkpoint %d or older",
      version,
      state.version,
      state.version
    )
  elseif version < state.checkpoint then
    refuse.with(
      "STATE_LOST",
      "batch %d is no longer kept because checkpoint %d covers it; restart the trainer from that checkpoint",
      version,
      state.checkpoint
    )
  end
end

transition.define({
  name = "take",
  arguments = { "trainer:name", "version:optional" },
  frees = true,
  apply = function(run, args)
    local state = run.state
    local version = args.version >= 0 and args.version or state.version
    check(run, version)
    local ids = batches.read(run, version)
    if not ids and state.ended == 1 then
      refuse.with("ENDED", "the run is over after %d updates", state.version)
    end
    if trainers.attach(run, args.trainer) then
      changes.hdel(run.key.sender, "address") -- its predecessor's
    end
    if ids then
      return batch_reply(run, version, ids)
    end
    leases.maintain(run)

    local buffer = state.frontier
    if not slots.is_ready(run, buffer) then
      drop_after_timeout(run, buffer)
    end
    if not slots.is_ready(run, buffer) then
      if starved(run) then
        context.set(run, "ended", 1)
        events.log(run, "ended", { reason = "prompts_exhausted" })
        events.signal(run, "ended")
        events.signal_trainer(run, "ended")
      end
      return { ready = false }
    end
    if run.config.buffer_slots > run.config.batch_size then
      clear_reserved(run, buffer)
    end
    ids = slots.empty_buffer(run, buffer)
    batches.write(run, buffer, ids)
    context.set(run, "frontier", buffer + 1)
    reset_timeout(run)
    events.log(run, "take", { version = buffer, trainer = args.trainer, groups = ids })
    return batch_reply(run, buffer, ids)
  end,
})
