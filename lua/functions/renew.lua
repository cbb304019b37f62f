--[[
roq_renew: a worker's heartbeat. Extends the lease of everything it holds, reports its weights version, and returns
the claims that it should stop generating. Idempotent.

Arguments:
  worker        the worker's name
  version       weights version it has loaded; "" leaves it unchanged
  info          JSON object about the worker, for status; "" leaves it unchanged
  acknowledged  the `acknowledge` of its last renewal, 0 at first: cancellations up to it are forgotten
Reply:
  version, cancelled (group, member, token, reason), acknowledge, draining, paused, ended
Events: worker_joined, and those of expired leases
]]
transition.define({
  name = "renew",
  arguments = { "worker:name", "version:optional", "info:text", "acknowledged:integer" },
  frees = true,
  apply = function(run, args)
    local record = leases.touch(run, args.worker)
    leases.maintain(run)
    if args.version >= 0 or args.info ~= "" then
      if args.version >= 0 then
        record.version = args.version
        workers.pin_loaded(run, args.worker, args.version)
      end
      if args.info ~= "" then
        record.info = args.info
      end
      workers.write(run, record)
    end
    local cancelled, newest = cancellations.read(run, args.worker, args.acknowledged)
    return {
      version = run.state.version,
      cancelled = text.array(cancelled),
      acknowledge = newest,
      draining = record.draining == true,
      paused = run.state.paused == 1,
      ended = run.state.ended == 1,
    }
  end,
})
