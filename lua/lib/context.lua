-- The context of a transition: the run's keys, configuration and state, and the server's clock.

local M = {}

-- The keys of a run, in the order of KEYS. roq/protocol/keys.py holds the same list.
M.names = {
  "config", -- hash: the run's configuration, fixed at creation
  "state", -- hash: version, frontier, counters of the ledger
  "slots", -- hash: "3.2" -> "reserved 17" | "occupied 17"
  "groups", -- hash: 17 -> JSON, the group and its members
  "reserved", -- zset: group -> buffer * 1e6 + slot
  "occupied", -- zset: group -> buffer * 1e6 + slot
  "reserved_by_version", -- zset: group -> (v_traj * 1000 + buffer - v_traj) * 1e6 + slot
  "payloads", -- hash: "17.2" -> msgpack of the finished trajectory
  "prefixes", -- hash: "17.2" -> msgpack of the tokens kept so far
  "claims", -- zset, by name: "worker 17.2"
  "pending", -- zset: "17.2" -> place in the queue of members to issue
  "workers", -- hash: worker -> JSON
  "heartbeats", -- zset: worker -> lease end (ms)
  "pins", -- hash: worker -> versions whose files it needs
  "cancelled", -- zset, by name: "worker sequence 17.2 token reason"
  "departed", -- zset: worker that lost its lease -> when (ms)
  "requeued", -- list: "ordinal drops attempts"
  "dead", -- hash: ordinal -> JSON, dead letters: prompts and their last error
  "batches", -- hash: version -> groups of a taken batch, in slot order
  "weights", -- hash: version -> location
  "sender", -- hash: "address" -> where the trainer sends weights from
  "replies", -- hash: "client:lane" -> "sequence reply" (lib/replies.lua)
  "clients", -- zset: client -> last call (ms)
  "events", -- stream: every transition, bounded
  "signals", -- stream of one entry: wakes workers that wait for work
  "ready", -- stream of one entry: wakes the trainer
}

local config_fields = {
  "eta",
  "batch_size",
  "group_size",
  "buffer_slots",
  "group_candidates",
  "prompts",
  "epochs",
  "total_steps",
  "lease_ms",
  "max_attempts",
  "pause_after_failures",
  "on_drop",
  "filter_zero_variance",
  "post_process",
  "stuck_timeout_ms",
  "max_inflight",
  "max_payload_bytes",
  "max_trajectory_bytes",
  "event_log",
}

local state_fields = {
  "version",
  "frontier",
  "checkpoint",
  "freed",
  "next_ordinal",
  "next_group",
  "next_token",
  "trained",
  "filtered",
  "discarded",
  "payload_bytes",
  "signal",
  "ready_signal",
  "next_cancel",
  "next_pending",
  "stuck_since",
  "dropping_since",
  "sweeping",
  "trainer_seen",
  "paused",
  "completed",
  "judged",
  "failed",
  "in_vain",
  "failing",
  "ended",
  "revision",
}

local words = { on_drop = true, post_process = true }
local optional = {
  prompts = true,
  epochs = true,
  total_steps = true,
  post_process = true,
  stuck_timeout_ms = true,
  max_inflight = true,
  max_payload_bytes = true,
  stuck_since = true,
  dropping_since = true,
  sweeping = true,
  trainer_seen = true,
  pause_after_failures = true,
  completed = true,
  judged = true,
  failed = true,
  in_vain = true,
  failing = true,
}
-- The largest values, where loops depend on them: as roq/config.py has them; versions fit scores (lib/slots.lua).
local largest = {
  eta = 100,
  batch_size = 4096,
  group_size = 256,
  buffer_slots = 8192,
  group_candidates = 512,
  version = 9000000,
}

-- Read fields of `config` or `state`, and refuse what no transition writes there.
local function numbers(fields, values)
  local out = {}
  for i, field in ipairs(fields) do
    local value = values[i] ~= "" and values[i] or nil
    if not value and not optional[field] then
      refuse.damaged("%s is missing", field)
    elseif value and not words[field] then
      local number = tonumber(value)
      if not number or number < 0 or number > (largest[field] or 2 ^ 53) or number ~= math.floor(number) then
        refuse.damaged("%s is %s", field, string.sub(value, 1, 40))
      end
      value = number
    end
    out[field] = value
  end
  return out
end

-- Refuse a state that no run can be in: every loop over buffers goes from `frontier` to at most version + eta.
local function check(config, state)
  if state.frontier ~= state.version and state.frontier ~= state.version + 1 then
    refuse.damaged("frontier is %.0f at version %.0f", state.frontier, state.version)
  elseif state.freed > state.checkpoint or state.checkpoint > state.version then
    refuse.damaged(
      "checkpoint is %.0f and freed %.0f at version %.0f",
      state.checkpoint,
      state.freed,
      state.version
    )
  elseif config.batch_size > config.buffer_slots or config.group_size > config.group_candidates then
    refuse.damaged("batch_size or group_size is larger than what there is room for")
  end
end

-- Milliseconds on the server's clock.
function M.now()
  local time = redis.call("TIME")
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The table of keys only.
function M.keys(keys)
  if #keys ~= #M.names then
    refuse.with(
      "INVALID",
      "expected %d keys, got %d; use a client of this library's version",
      #M.names,
      #keys
    )
  end
  local key = {}
  for i, name in ipairs(M.names) do
    key[name] = keys[i]
  end
  return key
end

-- The run's name, from its keys.
local function name_of(keys)
  return string.match(keys[1], "{(.*)}") or keys[1]
end

-- Refuse a run that another revision of the library created: its records may differ.
function M.check_revision(keys, revision)
  revision = revision or "1"
  if tonumber(revision) ~= LIBRARY_REVISION then
    refuse.with(
      "CONFIG",
      "run '%s' was created by revision %s of the roq library, this is revision %d; create a new run",
      name_of(keys),
      revision,
      LIBRARY_REVISION
    )
  end
end

-- Open the run: two reads. Refuses when it was never created, or by another revision of the library, and when
-- its configuration or state cannot be.
function M.open(keys)
  local key = M.keys(keys)
  local values = redis.call("HMGET", key.config, unpack(config_fields))
  if not values[1] then
    refuse.with("NO_RUN", "there is no run '%s' on this server; create it first (roq init)", name_of(keys))
  end
  local state_values = redis.call("HMGET", key.state, unpack(state_fields))
  M.check_revision(keys, state_values[#state_fields])
  local config, state = numbers(config_fields, values), numbers(state_fields, state_values)
  check(config, state)
  return {
    key = key,
    now = M.now(),
    config = config,
    state = state,
    changed = {}, -- fields of the state to write at the end
    raw = {}, -- records of groups as they stand in Redis
    counts = {}, -- occupied and reserved slots of the buffers looked at
    moves = {}, -- slot moves of this transition, for the event
    woken = {}, -- signals given by this transition
  }
end

-- Change a field of the state (nil clears it); written once, by `commit`.
function M.set(run, field, value)
  run.state[field] = value
  run.changed[field] = value or ""
end

function M.add(run, field, amount)
  M.set(run, field, run.state[field] + amount)
end

-- Take the next number of a sequence.
function M.next(run, field)
  local number = run.state[field]
  M.set(run, field, number + 1)
  return number
end

-- Write the changed fields of the state, and what else was left for the end.
function M.commit(run)
  local fields = {}
  for field, value in pairs(run.changed) do
    fields[#fields + 1] = field
    fields[#fields + 1] = type(value) == "number" and text.int(value) or value
  end
  if #fields > 0 then
    changes.later("HSET", run.key.state, unpack(fields))
  end
  changes.commit(run.key)
end

-- The last buffer that weights `version` may reserve in.
function M.last_buffer(run, version)
  local last = version + run.config.eta
  if run.config.total_steps then
    last = math.min(last, run.config.total_steps - 1)
  end
  return last
end

return M
