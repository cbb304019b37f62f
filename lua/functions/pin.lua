--[[
roq_pin: protect the files of a weights version while this worker loads it. Idempotent. The pin
lasts as long as the worker's lease, and becomes its only one when the worker says it has loaded it (renew).

Arguments:
  worker    the worker's name
  version   weights version; "" is the newest
Reply:
  version, location
  sender            who sends it, when the trainer does (announce_sender)
Refusals:
  ROQ_NO_WEIGHTS   not registered, or retired since; pin the newest
]]
transition.define({
  name = "pin",
  arguments = { "worker:name", "version:optional" },
  apply = function(run, args)
    local version = args.version >= 0 and args.version or run.state.version
    local location = redis.call("HGET", run.key.weights, text.int(version))
    if not location then
      refuse.with("NO_WEIGHTS", "weights of version %d are not registered; pin the newest instead", version)
    end
    leases.touch(run, args.worker)
    workers.pin(run, args.worker, version)
    return { version = version, location = location, sender = trainers.sender(run) }
  end,
})
