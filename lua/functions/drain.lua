--[[
roq_drain: ask a worker to leave: it gets no new work, finishes what it has, and leaves. Idempotent.

Arguments:
  worker    the worker's name
  reason    human-readable
  by        who asked, human-readable
Reply:
  claims    number of claims that it still holds
Refusals:
  ROQ_NO_WORKER  no such worker is attached
Events: draining
]]
transition.define({
  name = "drain",
  arguments = { "worker:name", "reason:text", "by:text" },
  frees = true,
  apply = function(run, args)
    local record = workers.read(run, args.worker)
    if not record then
      refuse.with("NO_WORKER", "no worker %s is attached; `roq workers` lists them", args.worker)
    end
    if not record.draining then
      record.draining = true
      workers.write(run, record)
      events.log(run, "draining", { worker = args.worker, reason = args.reason, by = args.by })
      events.signal(run, "drain")
    end
    return { claims = claims.count(run, args.worker) }
  end,
})
