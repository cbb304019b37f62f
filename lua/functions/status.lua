--[[
roq_status: a consistent snapshot of a run, for displays and for a waiting trainer.

Arguments: none
Reply:
  see Status in roq/types.py: version, frontier, window_end, training, checkpoint, trainer, buffers,
  waiting (what the nearest buffer waits for), workers, ledger, inflight, pending, payload_bytes, …
]]
local WAITING = 16 -- Reserved slots of the nearest buffer that are listed
local WORKERS = 256 -- workers that are listed

local function seconds(milliseconds)
  return milliseconds / 1000
end

local function ledger(run, training)
  local state = run.state
  local in_slots = redis.call("ZCARD", run.key.reserved) + redis.call("ZCARD", run.key.occupied)
  if training then
    in_slots = in_slots + run.config.batch_size
  end
  return {
    issued = state.next_ordinal,
    trained = state.trained,
    in_slots = in_slots,
    requeued = redis.call("LLEN", run.key.requeued),
    filtered = state.filtered,
    discarded = state.discarded,
    dead = redis.call("HLEN", run.key.dead),
  }
end

local function buffers(run, training)
  local out = {}
  if training then
    out[1] =
      { buffer = training, occupied = run.config.batch_size, reserved = 0, empty = 0, state = "TRAINING" }
  end
  for buffer = run.state.frontier, context.last_buffer(run, run.state.version) do
    local counts = slots.counts(run, buffer)
    out[#out + 1] = {
      buffer = buffer,
      occupied = counts.occupied,
      reserved = counts.reserved,
      empty = run.config.buffer_slots - counts.occupied - counts.reserved,
      state = placement.buffer_state(run, buffer),
    }
  end
  return out
end

local function waiting(run)
  local out = {}
  for _, id in ipairs(slots.list(run, "reserved", run.state.frontier, WAITING)) do
    local record = groups.known(run, tonumber(id))
    local _, buffer, slot = slots.find(run, record.group)
    local owners, named, pending = {}, {}, 0
    for m = 0, #record.members do
      local member = groups.part(record, m)
      if member and member.state == "pending" then
        pending = pending + 1
      elseif member and member.state == "leased" and not named[member.worker] then
        named[member.worker] = true
        owners[#owners + 1] = member.worker
      end
    end
    out[#out + 1] = {
      buffer = buffer,
      slot = slot,
      group = record.group,
      ordinal = record.ordinal,
      age_s = seconds(run.now - record.since),
      owners = text.array(owners),
      pending = pending,
    }
  end
  return out
end

local function worker_list(run)
  local out = {}
  local alive = redis.call("ZRANGE", run.key.heartbeats, "0", text.int(WORKERS - 1), "WITHSCORES")
  for i = 1, #alive, 2 do
    local worker = alive[i]
    local record = workers.live(run, worker)
    out[#out + 1] = {
      worker = worker,
      version = record.version,
      claims = claims.count(run, worker),
      lease_left_s = seconds(tonumber(alive[i + 1]) - run.now),
      since_s = seconds(run.now - record.since),
      info = record.info,
      draining = record.draining,
      error = record.error,
      error_age_s = record.error_at and seconds(run.now - record.error_at),
    }
  end
  return out
end

transition.plain({
  name = "status",
  arguments = {},
  reads = true,
  apply = function(keys)
    local run = context.open(keys)
    local state = run.state
    local training = state.frontier > state.version and state.version or nil
    return text.json({
      version = state.version,
      frontier = state.frontier,
      window_end = context.last_buffer(run, state.version),
      training = training,
      checkpoint = state.checkpoint,
      trainer = redis.call("HGET", run.key.state, "trainer") or nil,
      trainer_seen_s = state.trainer_seen and seconds(run.now - state.trainer_seen),
      paused = state.paused == 1,
      failing = state.failing == 1,
      failed = state.failed or 0,
      last_failure = redis.call("HGET", run.key.state, "last_failure") or nil,
      ended = state.ended == 1,
      end_reason = progress.end_reason(run),
      signal = state.signal,
      inflight = redis.call("ZCARD", run.key.claims),
      pending = redis.call("ZCARD", run.key.pending),
      payload_bytes = state.payload_bytes,
      ledger = ledger(run, training),
      buffers = text.array(buffers(run, training)),
      waiting = text.array(waiting(run)),
      workers = text.array(worker_list(run)),
    })
  end,
})
