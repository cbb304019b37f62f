--[[
roq_leave: a worker leaves. Claims that it still holds become pending again, a bounded number per call; the
client calls until none is left. Idempotent.

Arguments:
  worker    the worker's name
Reply:
  left      number of claims that it still holds
Events: release, worker_left
]]
local BATCH = 16

transition.define({
  name = "leave",
  arguments = { "worker:name" },
  frees = true,
  apply = function(run, args)
    for _, name in ipairs(claims.names_of(run, args.worker, BATCH)) do
      local group, m = text.parse_member(name)
      leases.reopen(run, groups.known(run, group), m, false, true, "detach")
      events.log(run, "release", { group = group, member = m, worker = args.worker })
      events.signal(run, "release")
    end
    local left = claims.count(run, args.worker)
    if left == 0 then
      if redis.call("ZSCORE", run.key.heartbeats, args.worker) then
        events.log(run, "worker_left", { worker = args.worker })
      end
      leases.remove(run, args.worker, false) -- also one that was lost: it asks for nothing more
    end
    return { left = left }
  end,
})
