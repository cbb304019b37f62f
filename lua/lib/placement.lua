-- The placement rules of the protocol: Reserve as late as is legal, Occupy as early as is legal, and
-- the compaction that keeps Occupied, Empty, Reserved in this order in every buffer.

local M = {}

-- The latest legal Empty slot for weights `version`: buffer, slot; nil when the window is full.
-- With over-sampling (S > B) nothing is admitted while every legal buffer is READY.
function M.latest_empty(run, version)
  local needed, best_buffer = false, nil
  for buffer = context.last_buffer(run, version), run.state.frontier, -1 do
    if not best_buffer and slots.has_empty(run, buffer) then
      best_buffer = buffer
    end
    needed = needed or not slots.is_ready(run, buffer)
    if best_buffer and needed then
      return best_buffer, slots.last_empty(run, best_buffer)
    end
  end
end

-- Close a hole at (buffer, slot) among the Reserved: the first Reserved of the buffer moves into it.
local function close_hole(run, buffer, slot)
  local group, first = slots.first_reserved(run, buffer)
  if group and first < slot then
    slots.move(run, "reserved", group, slots.version_of(run, group), buffer, first, buffer, slot)
  end
end

-- The earliest legal buffer that still needs an Occupied group and satisfies `fits`; nil when there is none.
local function earliest_needing(run, first, v_traj, fits)
  for buffer = first, context.last_buffer(run, v_traj) do
    if not slots.is_ready(run, buffer) and fits(run, buffer) then
      return buffer
    end
  end
end

-- Occupy: move a finished group from its Reserved slot to the earliest legal Empty slot, shifting the
-- earliest movable Reserved into the gap. Returns buffer, slot; nil when no legal buffer needs it
-- (possible with over-sampling only), and then the group is out of its slot.
function M.occupy(run, group, v_traj)
  local _, gap_buffer, gap_slot = slots.find(run, group)
  slots.clear(run, "reserved", group, gap_buffer, gap_slot)
  local mover = slots.earliest_movable(run, gap_buffer, gap_slot)
  if mover then
    slots.move(run, "reserved", mover.group, mover.v_traj, mover.buffer, mover.slot, gap_buffer, gap_slot)
    close_hole(run, mover.buffer, mover.slot)
  else
    close_hole(run, gap_buffer, gap_slot)
  end

  local buffer = earliest_needing(run, run.state.frontier, v_traj, slots.has_empty)
  if not buffer then
    -- Over-sampling: the own buffer is READY. Swap with a Reserved of a later buffer that needs one.
    buffer = earliest_needing(run, gap_buffer + 1, v_traj, function()
      return true
    end)
    if not buffer then
      return nil
    end
    local other, slot = slots.first_reserved(run, buffer)
    local empty = slots.last_empty(run, gap_buffer)
    slots.move(run, "reserved", other, slots.version_of(run, other), buffer, slot, gap_buffer, empty)
  end
  local slot = slots.first_empty(run, buffer)
  slots.fill(run, "occupied", group, v_traj, buffer, slot)
  return buffer, slot
end

-- Pull Occupied groups forward until no buffer that needs one has an Empty slot before them. One
-- removal opens one slot, so at most one group moves to each buffer of the window.
local function pull_forward(run)
  local last = run.state.version + run.config.eta
  local source = run.state.frontier + 1
  for buffer = run.state.frontier, last do
    source = math.max(source, buffer + 1)
    if not slots.is_ready(run, buffer) and slots.has_empty(run, buffer) then
      while source <= last and slots.counts(run, source).occupied == 0 do
        source = source + 1
      end
      if source > last then
        return
      end
      local group, slot = slots.last_occupied(run, source)
      slots.move(run, "occupied", group, nil, source, slot, buffer, slots.first_empty(run, buffer))
    end
  end
end

-- Take a group out of its slot and keep the layout: after a Reserved the hole is closed, after an
-- Occupied the last Occupied of the buffer takes its place; then Occupied groups are pulled forward.
function M.remove(run, group)
  local kind, buffer, slot = slots.find(run, group)
  slots.clear(run, kind, group, buffer, slot)
  if kind == "reserved" then
    close_hole(run, buffer, slot)
  else
    local last, last_slot = slots.last_occupied(run, buffer)
    if last and last_slot > slot then
      slots.move(run, "occupied", last, nil, buffer, last_slot, buffer, slot)
    end
  end
  pull_forward(run)
end

-- PENDING, FULL or READY.
function M.buffer_state(run, buffer)
  if slots.is_ready(run, buffer) then
    return "READY"
  end
  return slots.has_empty(run, buffer) and "PENDING" or "FULL"
end

return M
