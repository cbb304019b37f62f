--[[
roq_publish: the weights of the next version are complete and readable (Publish). The window grows by one
buffer. Publishing a version again changes nothing.

Arguments:
  trainer   the trainer's name
  version   the new version: the taken batch's version plus 1
  weights   location of its files
  metrics   JSON object of the step's metrics, stored in the event; "" for none
Reply:
  version, signal, ended
Refusals:
  ROQ_FENCED     another trainer has taken over
  ROQ_NOT_READY  the batch of this update was not taken, or a version would be skipped
Events: publish, ended
]]
local MOST_METRICS = 4096 -- bytes, in the event stream

transition.define({
  name = "publish",
  arguments = { "trainer:name", "version:integer", "weights:text", "metrics:text" },
  frees = true,
  apply = function(run, args)
    local state = run.state
    if #args.metrics > MOST_METRICS then
      refuse.with("INVALID", "%d bytes of metrics are more than %d", #args.metrics, MOST_METRICS)
    end
    trainers.require(run, args.trainer)
    if
      args.version > state.version + 1
      or (args.version == state.version + 1 and state.frontier < args.version)
    then
      refuse.with(
        "NOT_READY",
        "version %d cannot be published: %d is published and batch %d was not taken, or lost a group since (reject)",
        args.version,
        state.version,
        args.version - 1
      )
    end
    trainers.seen(run)
    if args.version == state.version + 1 then
      context.set(run, "version", args.version)
      context.add(run, "trained", run.config.batch_size)
      changes.hset(run.key.weights, text.int(args.version), args.weights)
      events.log(
        run,
        "publish",
        { version = args.version, trainer = args.trainer, weights = args.weights, metrics = args.metrics }
      )
      if run.config.total_steps and args.version >= run.config.total_steps then
        context.set(run, "ended", 1)
        events.log(run, "ended", { reason = "total_steps" })
      end
      events.signal(run, "publish")
    end
    return { version = run.state.version, signal = run.state.signal, ended = run.state.ended == 1 }
  end,
})
