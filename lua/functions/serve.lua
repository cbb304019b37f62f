--[[
roq_serve: where the trainer sends weights from, for workers that would rather receive than read them. It
holds until another trainer takes over. Harmless to repeat.

Arguments:
  trainer   who
  address   of the trainer's sender, as `pin` tells it to workers; "" for none
Reply:
  address
Refusals:
  ROQ_FENCED      another trainer has taken over
  ROQ_NOT_READY   no trainer has taken a batch yet
]]
local LONGEST = 512 -- bytes

transition.define({
  name = "serve",
  arguments = { "trainer:name", "address:text" },
  frees = true,
  apply = function(run, args)
    if #args.address > LONGEST then
      refuse.with("INVALID", "an address of %d bytes is longer than %d", #args.address, LONGEST)
    end
    trainers.require(run, args.trainer)
    trainers.seen(run)
    -- Among the weights, which workers may not write: it is where they would get others from.
    if args.address == "" then
      redis.call("HDEL", run.key.weights, "sender")
    else
      redis.call("HSET", run.key.weights, "sender", args.address)
    end
    return { address = args.address }
  end,
})
