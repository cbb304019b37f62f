-- The steps after a group's last member: the zero-variance filter, its post-processing by a
-- worker if the run has one, and Occupy.

local M = {}

-- The number of complete members, and true if their rewards differ.
function M.complete_members(record)
  local count, varied, first = 0, false, nil
  for _, member in ipairs(record.members) do
    if member.state == "complete" then
      count = count + 1
      first = first or member.reward
      varied = varied or member.reward ~= first
    end
  end
  return count, varied
end

-- Occupy a slot with a finished group. Returns the reply: "occupied" or "surplus".
function M.occupy(run, record)
  local _, from_buffer, from_slot = slots.find(run, record.group)
  local buffer, slot = placement.occupy(run, record.group, record.v)
  if not buffer then
    groups.delete(run, record)
    context.add(run, "discarded", 1)
    events.log(run, "discarded", {
      group = record.group,
      ordinal = record.ordinal,
      from = "reserved " .. text.place(from_buffer, from_slot),
      reason = "surplus",
    })
    return { status = "surplus" }
  end
  groups.write(run, record)
  events.log(
    run,
    "occupy",
    { group = record.group, ordinal = record.ordinal, at = text.place(buffer, slot), v_traj = record.v }
  )
  local ready
  if slots.counts(run, buffer).occupied == run.config.batch_size then
    ready = buffer
    if run.config.buffer_slots > run.config.batch_size then
      retire.hopeless(run)
    end
  end
  return { status = "occupied", buffer = buffer, slot = slot, ready = ready }
end

-- Lease the post-processing of a group to the worker that completed it. Returns the reply: "judging".
local function begin(run, record, worker)
  local _, buffer, slot = slots.find(run, record.group)
  record.judgement = { state = "pending", token = 0, attempt = 0, failures = 0 }
  claims.issue(run, record, 0, worker)
  slots.reindex(run, record.group, record.v, buffer, slot)
  groups.write(run, record)
  events.log(run, "judging", { group = record.group, ordinal = record.ordinal, worker = worker })
  return { status = "judging", judgement = claims.reply(record, 0, buffer, slot) }
end

-- A member is complete in the record; advance its group. Returns the reply.
function M.advance(run, record, worker)
  local count, varied = M.complete_members(record)
  if count < run.config.group_size then
    groups.write(run, record)
    return { status = "open" }
  elseif run.config.filter_zero_variance == 1 and not varied then
    retire.group(run, record, "filter", "zero_variance")
    return { status = "filtered" }
  end
  local spare = claims.cancel_open(run, record, "group_complete")
  if #spare > 0 then
    events.log(
      run,
      "cancelled",
      { group = record.group, ordinal = record.ordinal, members = spare, reason = "group_complete" }
    )
  end
  record.v = groups.oldest(record)
  if run.config.post_process then
    return begin(run, record, worker)
  end
  return M.occupy(run, record)
end

return M
