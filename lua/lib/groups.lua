-- Groups and their members: one JSON record per group. A group's slot is not in its record but in
-- the slots; a record without a slot belongs to a batch that was taken.
--
--   { group, ordinal, v, since, drops, members = [ { state, token, v, attempt, failures, … } ] }
--
-- Member states: pending (to be issued), leased (worker, v), complete (v, reward, tokens, bytes) and
-- cancelled (a candidate that was not needed). `v` is the oldest weights version of the member's tokens;
-- `reward` and `advantage` are text, to keep all digits.
--
-- With `post_process`, a complete group gets a `judgement`: the claim on its post-processing,
-- issued, leased and released like a member, as member 0.

local M = {}

-- A group's record, or nil.
function M.find(run, group)
  local raw = redis.call("HGET", run.key.groups, text.int(group))
  if not raw then
    return nil
  end
  run.raw[group] = raw
  local ok, record = pcall(text.object, raw)
  local members = ok and type(record) == "table" and record.group == group and record.members
  if type(members) ~= "table" or #members ~= run.config.group_candidates then
    refuse.damaged("group %s has a record that is none", text.int(group))
  end
  return record
end

-- The record of a group that a key of the run names.
function M.known(run, group)
  return group and M.find(run, group) or refuse.damaged("group %s has no record", tostring(group))
end

-- A group's record. Refuses a group that has left the run (FENCED) or was never issued (NO_GROUP).
function M.read(run, group)
  local record = M.find(run, group)
  if record then
    return record
  end
  if group >= run.state.next_group then
    refuse.with("NO_GROUP", "group %d was never issued in this run", group)
  end
  refuse.with("FENCED", "group %d has left the run (trained, filtered or dropped); drop this work", group)
end

function M.write(run, record)
  local raw = text.json(record)
  changes.hset(run.key.groups, text.int(record.group), raw, run.raw[record.group] or false)
  run.raw[record.group] = raw
end

-- A new group for an ordinal, all members pending. `drops` and `attempt` continue earlier counts, so
-- that a requeued prompt is sampled with other seeds.
function M.create(run, ordinal, drops, attempt)
  local members = {}
  for m = 1, run.config.group_candidates do
    members[m] = { state = "pending", token = 0, attempt = attempt, failures = 0 }
  end
  return {
    group = context.next(run, "next_group"),
    ordinal = ordinal,
    drops = drops,
    since = run.now,
    members = members,
  }
end

-- A member of a group, 0 for its post-processing; nil when there is none.
function M.part(record, m)
  return m == 0 and record.judgement or record.members[m]
end

-- v_traj of the group: the oldest version of any of its tokens; nil before the first.
function M.oldest(record)
  local oldest
  for _, member in ipairs(record.members) do
    if member.v and member.state ~= "cancelled" and (not oldest or member.v < oldest) then
      oldest = member.v
    end
  end
  return oldest
end

-- Delete a group's record and data. Its slot and claims must be gone.
function M.delete(run, record)
  local names, bytes = {}, 0
  for m, member in ipairs(record.members) do
    names[m] = text.member(record.group, m)
    bytes = bytes + (member.bytes or 0)
  end
  changes.later("HDEL", run.key.payloads, unpack(names))
  changes.hdel(run.key.groups, text.int(record.group), run.raw[record.group])
  run.raw[record.group] = nil
  context.add(run, "payload_bytes", -bytes)
end

return M
