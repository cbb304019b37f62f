-- Slots and their indexes. In every buffer Occupied slots come first, then Empty, then Reserved, so two
-- counts give its whole layout: Occupied are 1..o, Reserved are S-r+1..S. The counts are read from the
-- indexes, never stored.

local M = {}

-- Scores are integers below 2^53, which a double holds exactly: nine million versions.
local SPAN = 1000000 -- above the slots of a buffer
local AGES = 1000 -- above the buffers of one v_traj

local function place_score(buffer, slot)
  return text.int(buffer * SPAN + slot)
end

local function version_score(v_traj, buffer, slot)
  return text.int((v_traj * AGES + buffer - v_traj) * SPAN + slot)
end

-- Occupied and Reserved slots of a buffer: { occupied =, reserved = }.
function M.counts(run, buffer)
  local counts = run.counts[buffer]
  if not counts then
    local first, past = place_score(buffer, 0), "(" .. place_score(buffer + 1, 0)
    counts = {
      occupied = redis.call("ZCOUNT", run.key.occupied, first, past),
      reserved = redis.call("ZCOUNT", run.key.reserved, first, past),
    }
    run.counts[buffer] = counts
  end
  return counts
end

function M.has_empty(run, buffer)
  local counts = M.counts(run, buffer)
  return counts.occupied + counts.reserved < run.config.buffer_slots
end

function M.is_ready(run, buffer)
  return M.counts(run, buffer).occupied >= run.config.batch_size
end

function M.first_empty(run, buffer)
  return M.counts(run, buffer).occupied + 1
end

function M.last_empty(run, buffer)
  return run.config.buffer_slots - M.counts(run, buffer).reserved
end

-- The slot of a group: kind ("reserved" | "occupied"), buffer, slot; nil when it has none.
function M.find(run, group)
  for _, kind in ipairs({ "reserved", "occupied" }) do
    local score = redis.call("ZSCORE", run.key[kind], text.int(group))
    if score then
      score = tonumber(score)
      local buffer, slot = math.floor(score / SPAN), score % SPAN
      if
        buffer < run.state.frontier
        or buffer > run.state.version + run.config.eta
        or slot < 1
        or slot > run.config.buffer_slots
        or slot ~= math.floor(slot)
      then
        refuse.damaged("group %s is in slot %s.%s", text.int(group), tostring(buffer), tostring(slot))
      end
      return kind, buffer, slot
    end
  end
end

-- v_traj of a Reserved group, from the index.
function M.version_of(run, group)
  local score = redis.call("ZSCORE", run.key.reserved_by_version, text.int(group))
  if not score then
    refuse.damaged("group %s is in no version's index", text.int(group))
  end
  return math.floor(tonumber(score) / (AGES * SPAN))
end

-- Fill an Empty slot.
function M.fill(run, kind, group, v_traj, buffer, slot)
  local id, counts = text.int(group), M.counts(run, buffer)
  changes.zadd_new(run.key[kind], place_score(buffer, slot), id)
  changes.later("HSET", run.key.slots, text.place(buffer, slot), kind .. " " .. id)
  if kind == "reserved" then
    changes.zadd_new(run.key.reserved_by_version, version_score(v_traj, buffer, slot), id)
  end
  counts[kind] = counts[kind] + 1
  if kind == "occupied" and counts.occupied == run.config.batch_size then
    events.signal_trainer(run, "ready")
  end
end

-- Empty a filled slot.
function M.clear(run, kind, group, buffer, slot)
  local counts = M.counts(run, buffer)
  changes.zrem(run.key[kind], text.int(group), place_score(buffer, slot))
  changes.later("HDEL", run.key.slots, text.place(buffer, slot))
  if kind == "reserved" then
    changes.zrem(run.key.reserved_by_version, text.int(group))
  end
  counts[kind] = counts[kind] - 1
end

-- Move a group to an Empty slot.
function M.move(run, kind, group, v_traj, from_buffer, from_slot, buffer, slot)
  M.clear(run, kind, group, from_buffer, from_slot)
  M.fill(run, kind, group, v_traj, buffer, slot)
  run.moves[#run.moves + 1] = text.int(group)
    .. ":"
    .. text.place(from_buffer, from_slot)
    .. ">"
    .. text.place(buffer, slot)
end

-- Note that a Reserved group's v_traj changed.
function M.reindex(run, group, v_traj, buffer, slot)
  changes.zadd(run.key.reserved_by_version, version_score(v_traj, buffer, slot), text.int(group))
end

local function one(run, command, kind, from, to)
  local found = redis.call(command, run.key[kind], from, to, "WITHSCORES", "LIMIT", "0", "1")
  if found[1] then
    return tonumber(found[1]), tonumber(found[2]) % SPAN
  end
end

-- The first Reserved of a buffer: group, slot.
function M.first_reserved(run, buffer)
  return one(run, "ZRANGEBYSCORE", "reserved", place_score(buffer, 0), "(" .. place_score(buffer + 1, 0))
end

-- The last Occupied of a buffer: group, slot.
function M.last_occupied(run, buffer)
  return one(run, "ZREVRANGEBYSCORE", "occupied", "(" .. place_score(buffer + 1, 0), place_score(buffer, 0))
end

-- Groups in the slots of one kind of a buffer, in slot order, at most `limit`.
function M.list(run, kind, buffer, limit)
  local first, past = place_score(buffer, 0), "(" .. place_score(buffer + 1, 0)
  return redis.call("ZRANGEBYSCORE", run.key[kind], first, past, "LIMIT", "0", text.int(limit))
end

-- The earliest Reserved of one v_traj strictly before a gap, in a buffer that is not READY.
local function earliest_of(run, v_traj, gap_buffer, gap_slot)
  local past = "(" .. version_score(v_traj, gap_buffer, gap_slot)
  local from = version_score(v_traj, v_traj, 0)
  for _ = 0, run.config.eta + 1 do
    local found =
      redis.call("ZRANGEBYSCORE", run.key.reserved_by_version, from, past, "WITHSCORES", "LIMIT", "0", "1")
    if not found[1] then
      return nil
    end
    local score = tonumber(found[2])
    local buffer, slot = math.floor(score / SPAN) % AGES + v_traj, score % SPAN
    if not M.is_ready(run, buffer) then
      return { group = tonumber(found[1]), v_traj = v_traj, buffer = buffer, slot = slot }
    end
    from = version_score(v_traj, buffer + 1, 0) -- over-sampling: a place in a READY buffer frees nothing
  end
end

-- The earliest Reserved strictly before a gap whose v_traj still allows the gap's buffer: { group, v_traj,
-- buffer, slot } or nil. One query for each live v_traj, at most eta + 1; with over-sampling one
-- more for every READY buffer that is skipped.
function M.earliest_movable(run, gap_buffer, gap_slot)
  local best
  for v_traj = math.max(0, gap_buffer - run.config.eta), run.state.version do
    local found = earliest_of(run, v_traj, gap_buffer, gap_slot)
    if
      found
      and (not best or found.buffer < best.buffer or (found.buffer == best.buffer and found.slot < best.slot))
    then
      best = found
    end
  end
  return best
end

-- Reserved groups with v_traj below `version`, oldest first, at most `limit`.
function M.reserved_before(run, version, limit)
  local past = "(" .. version_score(version, version, 0)
  return redis.call("ZRANGEBYSCORE", run.key.reserved_by_version, "-inf", past, "LIMIT", "0", text.int(limit))
end

-- Empty a whole READY buffer whose slots hold Occupied groups only; returns them in slot order.
function M.empty_buffer(run, buffer)
  local first, past = place_score(buffer, 0), "(" .. place_score(buffer + 1, 0)
  if M.counts(run, buffer).occupied ~= run.config.batch_size then
    refuse.damaged("buffer %s has more Occupied groups than a batch", text.int(buffer))
  end
  local groups = changes.zrem_scores(run.key.occupied, first, past)
  local places = {}
  for slot = 1, #groups do
    places[slot] = text.place(buffer, slot)
  end
  changes.later("HDEL", run.key.slots, unpack(places))
  run.counts[buffer] = nil
  return groups
end

return M
