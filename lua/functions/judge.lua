--[[
roq_judge: the post-processing of a group is done (post_process). The group becomes Occupied, or
leaves the run if it is filtered.

Arguments:
  request     identity of the call (lib/replies.lua)
  group, token, worker   the claim, whose member is 0
  keep        1 to train the group, 0 to filter it
  reason      why it is filtered, human-readable; "" when it is kept
  advantages  JSON array of numbers as text, one for each complete member in order; "" when the trainer
              computes them from the rewards
Reply:
  status      "occupied" | "filtered" | "surplus"
  buffer, slot, ready   see roq_complete
Refusals:
  ROQ_FENCED   the claim was superseded
  ROQ_NO_GROUP no such group was ever issued
  ROQ_INVALID  keep is not 0 or 1; not one finite advantage for each complete member
Events: occupy, filtered, discarded
]]

-- The advantages as text with all digits; nil when none are given.
local function read_advantages(record, given)
  if given == "" then
    return nil
  end
  local ok, values = pcall(text.object, given)
  local count = judging.complete_members(record)
  if not ok or type(values) ~= "table" or #values ~= count then
    refuse.with("INVALID", "group %d needs one advantage for each of its %d members", record.group, count)
  end
  for i, value in ipairs(values) do
    values[i] = arguments.float(tostring(value))
    if not values[i] or math.abs(tonumber(values[i])) > arguments.LARGEST_REWARD then
      refuse.with(
        "INVALID",
        "%s is no advantage: a number of at most 1e9",
        string.sub(tostring(value), 1, 40)
      )
    end
  end
  return values
end

transition.define({
  name = "judge",
  arguments = {
    "request:text",
    "group:integer",
    "token:integer",
    "worker:name",
    "keep:integer",
    "reason:text",
    "advantages:text",
  },
  apply = function(run, args)
    local record = groups.read(run, args.group)
    claims.claimed(record, 0, args.token, args.worker)
    if args.keep > 1 then
      refuse.with("INVALID", "keep must be 1 (train it) or 0 (filter it), not %d", args.keep)
    end
    local advantages = read_advantages(record, args.advantages)
    progress.judged(run)
    if args.keep == 0 then
      return { status = retire.group(run, record, "filter", args.reason) }
    end
    claims.post_processed(run, record, advantages)
    if run.config.max_inflight then
      events.signal(run, "inflight")
    end
    return judging.occupy(run, record)
  end,
})
