-- The event stream (an audit trail, bounded) and the signals (they wake those who wait).

local M = {}

-- Every event and its fields, in the order in which they are written: name:kind, with ? where a field may be
-- left out. roq/protocol/events.py reads this table; docs/observing.md says what each event means.
local issued =
  { "group:integer", "ordinal:integer", "members:members", "at:place", "v_traj:integer", "worker:text" }
local left = { "group:integer", "ordinal:integer", "from:text", "reason:text?", "by:text?", "moves:moves?" }
local declared = {
  created = {},
  ended = { "reason:text" },
  paused = { "reason:text?", "by:text?" },
  resumed = { "reason:text?", "by:text?" },
  worker_joined = { "worker:text" },
  worker_left = { "worker:text" },
  worker_lost = { "worker:text" },
  draining = { "worker:text", "reason:text?", "by:text?" },
  trainer_joined = { "trainer:text" },
  reserve = issued,
  issue = issued,
  reissue = issued,
  complete = { "group:integer", "member:integer", "worker:text", "tokens:integer", "reward:float" },
  cancelled = { "group:integer", "ordinal:integer", "members:members", "reason:text" },
  judging = { "group:integer", "ordinal:integer", "worker:text" },
  occupy = { "group:integer", "ordinal:integer", "at:place", "v_traj:integer", "moves:moves?" },
  release = { "group:integer", "member:integer", "worker:text", "failed:integer?", "reason:text?" },
  expired = { "group:integer", "member:integer", "worker:text" },
  requeued = left,
  discarded = left,
  filtered = left,
  dead = left,
  revived = { "ordinal:integer", "reason:text?", "by:text?" },
  take = { "version:integer", "trainer:text", "groups:groups", "moves:moves?" },
  publish = { "version:integer", "trainer:text", "weights:text?", "metrics:metrics?" },
  checkpointed = { "version:integer", "trainer:text" },
}

local function as_it_is(value)
  return value
end

local function spaced(values)
  return table.concat(values, " ")
end

-- How a value of each kind is written.
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

-- A declaration, taken apart when it is first used: a list of { name, write, optional }.
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
  redis.call("XADD", run.key.events, "MAXLEN", "~", text.int(run.config.event_log), "*", unpack(entry))
end

local function wake(run, stream, field, reason)
  if run.woken[field] then
    return
  end
  run.woken[field] = true
  context.add(run, field, 1)
  redis.call("XADD", run.key[stream], "MAXLEN", "1", text.int(run.state[field]) .. "-0", "reason", reason)
end

-- Wake the workers that wait for work, once per transition: new weights, or room.
function M.signal(run, reason)
  wake(run, "signals", "signal", reason)
end

-- Wake the trainer: a buffer is READY, or the run is over.
function M.signal_trainer(run, reason)
  wake(run, "ready", "ready_signal", reason)
end

return M
