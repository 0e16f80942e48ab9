// Policies and compaction with what comes back, statistics of queries, plans.
using System;
using System.IO;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class RetentionTests
    {
        private static readonly Policy Streaming =
            new Policy { Scorer = Scorer.Streaming, Budget = 32, Sinks = 4 };

        [Test]
        public static void CompactionReturnsBlocks()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                engine.Run(sequence, 1, 100);
                Check.Fails(Status.Invalid, "policy", () => pool.Compress(sequence));
                CompressReport report = pool.Compress(sequence, Streaming);
                Check.Equal(CompressOutcome.Done, report.Outcome, "outcome");
                Check.Equal(2u, report.Layers, "layers");
                Check.Equal(400UL, report.TokensBefore, "tokens before: 100, 2 layers, 2 heads");
                Check.Equal(128UL, report.TokensAfter, "tokens after");
                Check.Equal(14UL, report.BlocksBefore, "blocks before");
                Check.Equal(4UL, report.BlocksAfter, "blocks after");
                Check.Equal(10UL, report.BlocksReturned, "blocks returned");
                Check.Equal(10UL * 16 * 2 * 2 * 32 * 2, report.BytesReturned, "bytes returned");
                Check.Equal(4UL, pool.GetStats().LiveBlocks, "live blocks");
                Check.Equal(1u, pool.GetInfo(sequence).Compactions, "rounds");
                engine.CheckNext(sequence, 1,
                                 Enumerable.Range(0, 4).Concat(Enumerable.Range(72, 29)).ToArray());
                Check.Equal(CompressOutcome.Nothing,
                            pool.Compress(pool.CreateSequence(Streaming)).Outcome, "of nothing");
            }
        }

        [Test]
        public static void APolicyRunsAtStepEnd()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                engine.Run(sequence, 1, 30);
                pool.SetPolicy(sequence, new Policy
                {
                    Scorer = Scorer.Streaming, Budget = 16, Every = 10, PromptTokens = 5,
                    Options = PolicyOptions.ProtectPrompt
                });
                StepReport report = engine.Run(sequence, 1, 10);
                Check.Equal(1UL, report.Compactions, "rounds");
                Check.Equal(4UL, report.BlocksReturned, "blocks returned: 2 of 3 in each layer");
                Check.Equal(16UL, pool.GetLayerInfo(sequence, 0).Retained, "retained");
                var positions = new uint[16];
                pool.GetPositions(sequence, 1, 0, positions);
                Check.SameElements(
                    Enumerable.Range(0, 5).Concat(Enumerable.Range(29, 11)).Select(p => (uint)p),
                    positions, "the prompt and the newest");
                pool.SetPolicy(sequence, null);
                Check.Equal(0UL, engine.Run(sequence, 1, 10).Compactions, "without a policy");
            }
        }

        /// <summary>Small norms stay: of 20 tokens, every fourth key is a tenth as long.</summary>
        [Test]
        public static void KeyNormKeepsShortKeys()
        {
            using (var engine = new Engine(layers: 1))
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                float[] keys = Engine.Rows(0, 1, 0, 20, 0);
                for (int i = 0; i < keys.Length; ++i)
                {
                    keys[i] = i / 64 % 4 == 1 ? 0.1f : 1f;
                }
                var layout = new TensorLayout(20, Engine.KvHeads, Engine.Dim);
                using (Step step = pool.BeginStep())
                {
                    step.Append(sequence, 20);
                    step.Reserve();
                    step.Write(0, ReadOnlyTensor.Float32(keys, layout),
                               ReadOnlyTensor.Float32(keys, layout));
                    step.End();
                }
                pool.Compress(sequence, new Policy { Scorer = Scorer.KeyNorm, Budget = 5 });
                var positions = new uint[5];
                pool.GetPositions(sequence, 0, 1, positions);
                Check.SameElements(new uint[] { 1, 5, 9, 13, 17 }, positions, "survivors");
            }
        }

        [Test]
        public static void ARoundInAStepIsDeferred()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence(Streaming);
                using (Step step = pool.BeginStep())
                {
                    engine.Forward(step, sequence, 1, 60);
                    Check.Equal(CompressOutcome.Deferred, pool.Compress(sequence).Outcome, "now");
                    Check.Equal(1UL, step.End().Compactions, "at the end");
                }
                Check.Equal(32UL, pool.GetLayerInfo(sequence, 0).Retained, "retained");
            }
        }

        [Test]
        public static void AForkIsNotTouchedByCompaction()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence parent = pool.CreateSequence();
                engine.Run(parent, 1, 64);
                Sequence child = pool.Fork(parent);
                CompressReport report = pool.Compress(parent, Streaming);
                Check.Equal(0UL, report.BlocksReturned, "the child still reads them");
                Check.Equal(4UL, report.BlocksCopied, "copied");
                engine.CheckNext(child, 1);
                pool.Check();
            }
        }

        [Test]
        public static void AnElasticPoolGivesSlabsBack()
        {
            using (var engine = new Engine(config => config.Options = PoolOptions.Elastic))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Run(engine, sequence, 7000);
                Run(engine, sequence, 7000); // 1750 blocks of 4 KiB: four slabs, of which two stay
                Check.Equal(4UL, engine.Pool.GetStats().SlabsResident, "resident");
                engine.Pool.ReleaseSequence(sequence);
                PoolStats stats = engine.Pool.GetStats();
                Check.Equal(2UL, stats.SlabsGivenBack, "given back");
                Check.Equal(2UL, stats.SlabsResident, "resident afterwards");
            }
        }

        private static Engine Rotated()
        {
            return new Engine(shape: layer => layer.Rope = new Rope
            {
                Style = RopeStyle.Half,
                InverseFrequencies = Enumerable.Range(0, (int)Engine.Dim / 2)
                    .Select(band => Math.Pow(10000, -2.0 * band / Engine.Dim)).ToArray()
            });
        }

        /// <summary>The first token stands at position 0, where the rotation does nothing: band f
        /// of its query is (q[f], q[f + dim/2]).</summary>
        [Test]
        public static void StatisticsAreMeansOfQueries()
        {
            using (Engine engine = Rotated())
            {
                Sequence sequence = engine.Pool.CreateSequence(gatherStatistics: true);
                engine.Run(sequence, 1, 1);
                var statistics = new QueryStatistics(1, Engine.QueryHeads, Engine.Dim / 2);
                engine.Pool.GetStatistics(sequence, statistics);
                Check.Equal(1UL, statistics.Tokens, "tokens");
                float[] query = Engine.Row(2, 1, 0, 1);
                for (int i = 0; i < statistics.MeanReal.Length; ++i)
                {
                    double real = query[i / 16 * 32 + i % 16];
                    double imaginary = query[i / 16 * 32 + i % 16 + 16];
                    Check.Close(
                        new[] { real, imaginary, Math.Sqrt(real * real + imaginary * imaginary) },
                        new double[] { statistics.MeanReal[i], statistics.MeanImaginary[i],
                                       statistics.MeanMagnitude[i] }, 1e-5, $"band {i}");
                }
            }
        }

        /// <summary>Of two tokens, the second turned back by its position: squares of half of what
        /// they differ by.</summary>
        [Test]
        public static void StatisticsHoldCovariances()
        {
            using (Engine engine = Rotated())
            {
                Sequence sequence = engine.Pool.CreateSequence(gatherStatistics: true);
                engine.Run(sequence, 1, 2);
                var found = new QueryStatistics(1, Engine.QueryHeads, Engine.Dim / 2, true);
                engine.Pool.GetStatistics(sequence, found);
                float[] first = Engine.Row(2, 1, 0, 1), second = Engine.Row(2, 1, 1, 1);
                for (int i = 0; i < found.Covariance.Length; ++i)
                {
                    int at = i / 16 * 32 + i % 16;
                    double angle = Math.Pow(10000, -2.0 * (i % 16) / Engine.Dim);
                    double real = second[at] * Math.Cos(angle) + second[at + 16] * Math.Sin(angle);
                    double other = second[at + 16] * Math.Cos(angle) - second[at] * Math.Sin(angle);
                    double byReal = (first[at] - real) / 2, byOther = (first[at + 16] - other) / 2;
                    Check.Close(
                        new[] { byReal * byReal, byOther * byOther, byReal * byOther },
                        new double[] { found.VarianceReal[i], found.VarianceImaginary[i],
                                       found.Covariance[i] }, 1e-5, $"band {i}");
                }
                engine.Pool.SetStatistics(found);
                found.Covariance[3] = 99;
                Check.Fails(Status.Invalid, "covariance", () => engine.Pool.SetStatistics(found));
            }
        }

        [Test]
        public static void StatisticsGoThroughAFile()
        {
            string path = Path.Combine(Path.GetTempPath(), "kvrt-Größe-" + Guid.NewGuid());
            try
            {
                using (Engine engine = Rotated())
                {
                    var policy = new Policy { Scorer = Scorer.TriAttention, Budget = 16 };
                    Sequence learnt = engine.Pool.CreateSequence(gatherStatistics: true);
                    Check.Fails(Status.Invalid, "gathered no queries",
                                () => engine.Pool.SaveStatistics(learnt, path));
                    engine.Run(learnt, 1, 50);
                    engine.Pool.SaveStatistics(learnt, path);
                    Check.True(File.Exists(path), "the file is there under its name");

                    Sequence fresh = engine.Pool.CreateSequence(policy);
                    Run(engine, fresh, 40);
                    Check.Equal(CompressOutcome.NoStatistics, engine.Pool.Compress(fresh).Outcome,
                                "without statistics");
                    engine.Pool.LoadStatistics(path);
                    Check.Equal(CompressOutcome.Done, engine.Pool.Compress(fresh).Outcome, "with");
                    Check.Equal(16UL, engine.Pool.GetLayerInfo(fresh, 0).Retained, "retained");
                }
                CheckDamage(path);
            }
            finally
            {
                File.Delete(path);
            }
        }

        /// <summary>A step without learning from its queries.</summary>
        private static void Run(Engine engine, Sequence sequence, uint rows)
        {
            var layout = new TensorLayout(rows, Engine.KvHeads, Engine.Dim);
            using (Step step = engine.Pool.BeginStep())
            {
                step.Append(sequence, rows);
                step.Reserve();
                for (uint layer = 0; layer < engine.Layers; ++layer)
                {
                    step.Write(layer,
                        ReadOnlyTensor.Float32(Engine.Rows(0, 2, 0, rows, layer), layout),
                        ReadOnlyTensor.Float32(Engine.Rows(1, 2, 0, rows, layer), layout));
                }
                step.End();
            }
        }

        private static void CheckDamage(string path)
        {
            byte[] bytes = File.ReadAllBytes(path);
            bytes[bytes.Length / 2] ^= 1;
            File.WriteAllBytes(path, bytes);
            using (Engine engine = Rotated())
            {
                KvrtIOException error = Check.Throws<KvrtIOException>(
                    () => engine.Pool.LoadStatistics(path), "a damaged file");
                Check.Equal(Status.Corrupt, error.Status, "status");
                Check.Fails(Status.IO, "", () => engine.Pool.LoadStatistics("/nowhere/file"));
            }
        }

        [Test]
        public static void GivenStatisticsServeSequences()
        {
            using (Engine engine = Rotated())
            {
                for (uint layer = 0; layer < engine.Layers; ++layer)
                {
                    var statistics = new QueryStatistics(layer, Engine.QueryHeads, Engine.Dim / 2)
                    {
                        Tokens = 10
                    };
                    for (int i = 0; i < statistics.MeanReal.Length; ++i)
                    {
                        statistics.MeanReal[i] = 1;
                        statistics.MeanMagnitude[i] = 1;
                    }
                    engine.Pool.SetStatistics(statistics);
                }
                var policy = new Policy { Scorer = Scorer.TriAttention, Budget = 16 };
                Sequence sequence = engine.Pool.CreateSequence(policy);
                Run(engine, sequence, 40);
                CompressReport report = engine.Pool.Compress(sequence);
                Check.Equal(CompressOutcome.Done, report.Outcome, "outcome");
                policy.Options = PolicyOptions.StatisticsOnline;
                Sequence online = engine.Pool.CreateSequence(policy);
                Run(engine, online, 40);
                Check.Equal(CompressOutcome.NoStatistics, engine.Pool.Compress(online).Outcome,
                            "with statistics of its own only");
            }
        }

        /// <summary>16 tokens of 2 heads with keys and values of 32 halves are 4096 bytes a block
        /// and layer.</summary>
        [Test]
        public static void APlanSaysWhatIsNeeded()
        {
            var config = new PoolConfig { ArenaBytes = 8 << 20, MaxSequences = 10 };
            var model = new Model(Enumerable.Repeat(Engine.NewLayer(), 2));
            PlanReport plan = Pool.Plan(config, model, 3, 100);
            Check.Equal(3UL, plan.Sequences, "sequences");
            Check.Equal(100UL, plan.TokensPerSequence, "tokens");
            Check.Equal(512UL, plan.BytesPerToken, "bytes per token");
            Check.Equal(2UL * 7 * 4096, plan.BytesPerSequence, "bytes per sequence");
            Check.Equal(2UL << 20, plan.ArenaBytesNeeded, "arena");
            Check.True(plan.MetadataBytes != 0 && plan.SequencesThatFit >= 3, "the rest");
            Check.Equal(10UL, Pool.Plan(config, model).Sequences, "default of sequences");
            Check.Equal(32768UL, Pool.Plan(config, model).TokensPerSequence, "default of tokens");
            Check.Equal(2UL * 4096, plan.BytesPerBlock, "bytes per block");
            Check.Equal(2UL * 7, plan.BlocksPerSequence, "blocks per sequence");
            Check.Equal(512UL, plan.FullBytesPerToken, "bytes beyond windows");
            Check.Equal(0UL, plan.ConstantBytesPerSequence, "no windows");
            // 4 slabs of 512 blocks over 6 tables.
            Check.Equal(4UL * 512 / 6 * 16, plan.TokensThatFitEach, "tokens of each");
            Check.Equal((8UL << 20) / 512, plan.TokensByBytes, "tokens by bytes");
            using (var pool = new Pool(config, model))
            {
                Check.Equal(plan.MetadataBytes, pool.GetStats().MetadataBytes, "metadata");
            }
        }

        [Test]
        public static void APlanWithoutAnArenaSaysHowLargeItMustBe()
        {
            Layer[] layers = Enumerable.Range(0, 3).Select(_ => Engine.NewLayer()).ToArray();
            layers[1].Window = 32; // touches up to 3 blocks
            layers[2].SharedLayer = 0;
            var config = new PoolConfig();
            ulong[] blocks = { 63, 3, 0 };
            for (uint i = 0; i < 3; ++i)
            {
                PlanReport plan = Pool.Plan(config, new Model(layers), 100, 1000, i);
                Check.Equal(66UL * 4096, plan.BytesPerSequence, "bytes per sequence");
                Check.Equal((66UL * 100 + 511) / 512 << 21, plan.ArenaBytesNeeded, "arena");
                Check.Equal(3UL * 4096, plan.ConstantBytesPerSequence, "window");
                Check.Equal(0UL, plan.SequencesThatFit + plan.TokensThatFit +
                            plan.TokensThatFitEach + plan.TokensByBytes, "what fits in nothing");
                Check.Equal(i, plan.Layer, "layer");
                Check.Equal(blocks[i] * 4096, plan.LayerBytesPerSequence, "of the layer");
                Check.Equal(blocks[i] == 0 ? 0UL : 4096, plan.LayerBytesPerBlock, "its block");
            }
        }
    }
}
