// Sequences: fork, truncate, pins, positions, lengths, stale handles.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class SequenceTests
    {
        [Test]
        public static void LengthsFollowAStep()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence(userData: 77);
                engine.Run(sequence, 1, 20);
                using (Step step = pool.BeginStep())
                {
                    engine.Forward(step, sequence, 1, 3);
                    SequenceInfo during = pool.GetInfo(sequence);
                    Check.True(during.InStep, "in a step");
                    Check.Equal(23UL, during.Capacity, "capacity");
                    Check.Equal(23UL, during.Written, "written");
                    Check.Equal(20UL, during.Accepted, "accepted");
                    step.End();
                }
                SequenceInfo info = pool.GetInfo(sequence);
                Check.True(!info.InStep, "no longer in a step");
                Check.Equal(23UL, info.Accepted, "accepted");
                Check.Equal(77UL, info.UserData, "user data");
                Check.Equal(4UL, info.Blocks, "blocks: two of 16 tokens in each of two layers");
                SequenceLayerInfo layer = pool.GetLayerInfo(sequence, 1);
                Check.Equal(23UL, layer.Retained, "retained");
                Check.Equal(2UL, layer.Blocks, "blocks of the layer");
            }
        }

        [Test]
        public static void ForksShareAndThenDiffer()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence parent = pool.CreateSequence();
                engine.Run(parent, 1, 20);
                Sequence child = pool.Fork(parent);
                Check.Equal(2UL, pool.GetLayerInfo(child, 0).SharedBlocks, "shared before a write");
                var more = new Sequence[3];
                pool.Fork(parent, more);
                Check.Equal(5, more.Append(child).Append(parent).Distinct().Count(), "all differ");
                engine.CheckNext(child, 1);
                Check.Equal(21UL, pool.GetInfo(child).Accepted, "the child went on");
                Check.Equal(20UL, pool.GetInfo(parent).Accepted, "the parent did not");
                engine.CheckNext(parent, 1);
                Check.Equal(1UL, pool.GetLayerInfo(child, 0).SharedBlocks, "still shared");
                pool.Check();
            }
        }

        [Test]
        public static void TruncateForgetsAndGoesOn()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, 1, 40);
                engine.Pool.Truncate(sequence, 17);
                Check.Equal(17UL, engine.Pool.GetInfo(sequence).Accepted, "accepted");
                engine.CheckNext(sequence, 1);
                Check.Fails(Status.Invalid, "", () => engine.Pool.Truncate(sequence, 19));
            }
        }

        [Test]
        public static void TruncateBehindAWindowHasNoSnapshot()
        {
            using (var engine = new Engine(shape: layer => layer.Window = 16))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, 1, 100);
                KvrtStateException error = Check.Throws<KvrtStateException>(
                    () => engine.Pool.Truncate(sequence, 10), "truncate");
                Check.Equal(Status.NoSnapshot, error.Status, "status");
                Check.Equal(Category.State, error.Category, "category");
                Check.Equal(100UL, engine.Pool.GetInfo(sequence).Accepted, "nothing changed");
            }
        }

        [Test]
        public static void PinnedPositionsSurviveCompaction()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                var policy = new Policy { Scorer = Scorer.Streaming, Budget = 12, Sinks = 2 };
                Sequence sequence = pool.CreateSequence(policy);
                engine.Run(sequence, 1, 40);
                pool.Pin(sequence, 10, 3);
                CompressReport report = pool.Compress(sequence);
                Check.Equal(CompressOutcome.Done, report.Outcome, "outcome");
                // 12 tokens: 0 and 1, 10 to 12, and the newest 7.
                int[] kept = { 0, 1, 10, 11, 12, 33, 34, 35, 36, 37, 38, 39 };
                Check.SameElements(kept.Select(p => (uint)p), Positions(pool, sequence), "kept");
                engine.CheckNext(sequence, 1, kept.Append(40).ToArray());
                pool.Unpin(sequence);
                pool.Compress(sequence);
                // Of the 13 retained now, 12 stay: the sinks and the newest 10, so that 10 goes.
                Check.SameElements(new uint[] { 0, 1, 11, 12, 33, 34, 35, 36, 37, 38, 39, 40 },
                                   Positions(pool, sequence), "unpinned");
            }
        }

        private static uint[] Positions(Pool pool, Sequence sequence)
        {
            ulong count = pool.GetPositions(sequence, 0, 0, Span<uint>.Empty);
            var positions = new uint[count];
            Check.Equal(count, pool.GetPositions(sequence, 0, 0, positions), "count");
            return positions;
        }

        [Test]
        public static void PositionsAreCutToTheRoomThereIs()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, 1, 10);
                uint[] room = { 99, 99, 99, 99 };
                ulong count = engine.Pool.GetPositions(sequence, 1, 1, room.AsSpan(0, 3));
                Check.Equal(10UL, count, "count");
                Check.SameElements(new uint[] { 0, 1, 2, 99 }, room, "three were written");
            }
        }

        [Test]
        public static void AReleasedSequenceIsStale()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                engine.Run(sequence, 1, 5);
                pool.ReleaseSequence(sequence);
                pool.ReleaseSequence(sequence); // again is no error
                Sequence successor = pool.CreateSequence();
                Check.True(successor != sequence, "the number is not used again");
                Action[] uses =
                {
                    () => pool.GetInfo(sequence), () => pool.Fork(sequence),
                    () => pool.Truncate(sequence, 0), () => pool.SetPolicy(sequence, null),
                    () => pool.Pin(sequence, 0, 1), () => pool.Unpin(sequence),
                    () => pool.GetLayerInfo(sequence, 0), () => pool.Compress(sequence),
                    () => pool.GetPositions(sequence, 0, 0, Span<uint>.Empty),
                    () => pool.SaveStatistics(sequence, "/nowhere"),
                    () => pool.GetStatistics(sequence, new QueryStatistics(0, 4, 16))
                };
                foreach (Action use in uses)
                {
                    Check.Equal(Status.Stale, Check.Throws<KvrtStateException>(use, "use").Status,
                                "status");
                }
                using (Step step = pool.BeginStep())
                {
                    Check.Fails(Status.Stale, "", () => step.Append(sequence, 1));
                }
            }
        }

        [Test]
        public static void ASequenceThatNeverWasIsAnError()
        {
            using (var engine = new Engine())
            {
                Check.Throws<KvrtException>(() => engine.Pool.GetInfo(default), "default");
                Check.Throws<KvrtException>(
                    () => engine.Pool.GetInfo(new Sequence(ulong.MaxValue)), "made up");
                Check.Throws<KvrtException>(
                    () => engine.Pool.ReleaseSequence(new Sequence(12345)), "released, made up");
            }
        }

        [Test]
        public static void SequencesAreValues()
        {
            var one = new Sequence(0x10000000a);
            Check.True(one == new Sequence(0x10000000a) && one != new Sequence(1), "operators");
            Check.True(one.Equals((object)new Sequence(0x10000000a)) && !one.Equals("x"), "Equals");
            Check.Equal(new Sequence(0x10000000a).GetHashCode(), one.GetHashCode(), "hash");
            Check.Equal("sequence 0x000000010000000a", one.ToString(), "text");
        }

        [Test]
        public static void LimitsOfSequencesAndPinsHold()
        {
            using (var engine = new Engine(config => config.MaxSequences = 2))
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                Check.Fails(Status.Limit, "max_sequences",
                            () => pool.Fork(sequence, new Sequence[2]));
                Check.Fails(Status.Invalid, "at least one child",
                            () => pool.Fork(sequence, Span<Sequence>.Empty));
                pool.CreateSequence();
                KvrtCapacityException full = Check.Throws<KvrtCapacityException>(
                    () => pool.CreateSequence(), "a third");
                Check.Equal(Status.Limit, full.Status, "status");
                for (ulong i = 0; i < 16; ++i)
                {
                    pool.Pin(sequence, i, 1);
                }
                Check.Fails(Status.Limit, "16 ranges", () => pool.Pin(sequence, 16, 1));
                Check.Fails(Status.Invalid, "count is 0", () => pool.Pin(sequence, 0, 0));
            }
        }
    }
}
