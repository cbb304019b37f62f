-- The event stream (a bounded audit trail) and the signals (which wake waiting clients).

local M = {}

-- Every event and its fields, in the order in which they are written: name:kind, with ? where a field may be
-- left out. The comment above an event says what happened. roq/protocol/events.py reads this table, and
-- tests/protocol/test_events.py compares it with the names passed to events.log.
local issued =
  { "group:integer", "ordinal:integer", "members:members", "at:place", "v_traj:integer", "worker:text" }
local left = { "group:integer", "ordinal:integer", "from:text", "reason:text?", "by:text?", "moves:moves?" }
local declared = {
  -- the run began
  created = {},
  -- all steps are trained, or the prompts are used up
  ended = { "reason:text" },
  -- a run that had ended continues: prompts were put back, or there are more steps or epochs
  reopened = { "reason:text?", "by:text?" },
  -- settings were changed between two starts: "name: old -> new; ..."
  configured = { "changes:text", "by:text?" },
  -- no new prompts are admitted
  paused = { "reason:text?", "by:text?" },
  -- new prompts are admitted again
  resumed = { "reason:text?", "by:text?" },
  -- a worker called for the first time
  worker_joined = { "worker:text" },
  -- a worker left
  worker_left = { "worker:text" },
  -- a worker's lease ran out
  worker_lost = { "worker:text" },
  -- a worker was asked to leave
  draining = { "worker:text", "reason:text?", "by:text?" },
  -- a trainer took the run over
  trainer_joined = { "trainer:text" },
  -- a new prompt took a slot, and a worker its first members
  reserve = issued,
  -- a worker got further members of a group
  issue = issued,
  -- a worker got members whose earlier claim ended
  reissue = issued,
  -- a trajectory is in
  complete = { "group:integer", "member:integer", "worker:text", "tokens:integer", "reward:float" },
  -- members that their group does not need any more
  cancelled = { "group:integer", "ordinal:integer", "members:members", "reason:text" },
  -- all members are in; a worker post-processes the group
  judging = { "group:integer", "ordinal:integer", "worker:text" },
  -- a group became Occupied
  occupy = { "group:integer", "ordinal:integer", "at:place", "v_traj:integer", "moves:moves?" },
  -- a claim was given back; `failed` 1: the attempt failed
  release = { "group:integer", "member:integer", "worker:text", "failed:integer?", "reason:text?" },
  -- a claim was lost with its worker's lease
  expired = { "group:integer", "member:integer", "worker:text" },
  -- a group left untrained; its prompt is issued again
  requeued = left,
  -- a group left untrained; it was not needed, or dropped
  discarded = left,
  -- a group left untrained; its rewards teach nothing, or it was filtered
  filtered = left,
  -- a group left untrained; its prompt became a dead letter
  dead = left,
  -- a dead letter is issued again
  revived = { "ordinal:integer", "reason:text?", "by:text?" },
  -- the trainer took a batch; its groups in slot order
  take = { "version:integer", "trainer:text", "groups:groups", "moves:moves?" },
  -- the batch in training went back to its slots, because a group of it is rejected
  returned = { "version:integer", "groups:groups", "reason:text?", "by:text?" },
  -- new weights; the trainer's figures of the step as JSON
  publish = { "version:integer", "trainer:text", "weights:text?", "metrics:metrics?" },
  -- batches before this version are no longer kept
  checkpointed = { "version:integer", "trainer:text" },
}

local function as_it_is(value)
  return value
end

local function spaced(values)
  return table.concat(values, " ")
end

-- How to write a value of each kind.
local kinds = {
  integer = text.int,
  float = as_it_is, -- text with all its digits (arguments.float)
  text = as_it_is,
  metrics = as_it_is, -- JSON
  place = as_it_is, -- text.place
  members = function(numbers)
    return table.concat(numbers, ",")
  end,
  groups = spaced,
  moves = spaced,
}

-- A declaration, parsed when it is first used: a list of { name, write, optional }.
local specs = {}
local function spec_of(event)
  local spec = specs[event]
  if not spec then
    spec = {}
    for i, field in ipairs(declared[event]) do
      local name, kind, optional = string.match(field, "^([%w_]+):(%w+)(%??)$")
      spec[i] = { name = name, write = kinds[kind], optional = optional == "?" }
    end
    specs[event] = spec
  end
  return spec
end

-- Append an event. `fields` are its values by name; empty text counts as left out. The slot moves so far are
-- added to it. A field that is missing or not declared is a fault of the caller, and an error.
function M.log(run, event, fields)
  local entry, size, given = { "event", event }, 2, 0
  if #run.moves > 0 then
    fields.moves, run.moves = run.moves, {}
  end
  for _, field in ipairs(spec_of(event)) do
    local value = fields[field.name]
    if value ~= nil then
      given = given + 1
    end
    if value ~= nil and value ~= "" then
      entry[size + 1], entry[size + 2] = field.name, field.write(value)
      size = size + 2
    elseif not field.optional then
      error("event " .. event .. " has no " .. field.name)
    end
  end
  for _ in pairs(fields) do
    given = given - 1
  end
  if given ~= 0 then
    error("event " .. event .. " has fields that are not declared")
  end
  changes.later("XADD", run.key.events, "MAXLEN", "~", text.int(run.config.event_log), "*", unpack(entry))
end

local function wake(run, stream, field, reason)
  if run.woken[field] then
    return
  end
  run.woken[field] = true
  context.add(run, field, 1)
  changes.later("XADD", run.key[stream], "MAXLEN", "1", text.int(run.state[field]) .. "-0", "reason", reason)
end

-- Wake waiting workers, once per transition: there are new weights, or room.
function M.signal(run, reason)
  wake(run, "signals", "signal", reason)
end

-- Wake the trainer: a buffer is READY, or the run has ended.
function M.signal_trainer(run, reason)
  wake(run, "ready", "ready_signal", reason)
end

return M
