// Pools on a CUDA device, chosen by configuration: what is told where there is none, and that host
// memory and device memory are not taken for each other.
using System;

namespace Kvrt.Tests
{
    internal static class CudaTests
    {
        private static PoolConfig Config(Device device)
        {
            return new PoolConfig { ArenaBytes = 4 << 20, Threads = 1, Device = device };
        }

        private static Model SmallModel()
        {
            return new Model(new[] { Engine.NewLayer() });
        }

        [Test]
        public static void TheDeviceIsThereOrTheReasonIs()
        {
            try
            {
                CudaDevice device = CudaDevice.Find();
                Check.True(device.Name.Length != 0 && device.MemoryBytes != 0 &&
                           device.ComputeMajor != 0, "the device");
            }
            catch (KvrtException error)
            {
                Check.Equal(Status.Unsupported, error.Status, error.Message);
                Check.Contains("CUDA", error.Message, "the reason");
                // A pool is refused for the same reason.
                KvrtException refused = Check.Throws<KvrtException>(
                    () => new Pool(Config(Device.Cuda), SmallModel()), "a pool there");
                Check.Equal(error.Message, refused.Message, "the pool's reason");
            }
        }

        [Test]
        public static void APoolOnTheCpuTakesNothingOfADevice()
        {
            using (var pool = new Pool(Config(Device.Cpu), SmallModel()))
            {
                Check.Fails(Status.Invalid, "CPU", () => pool.GetCudaMemory());
                Check.Fails(Status.Invalid, "CPU", () => pool.GetCudaScoring());
                Check.Fails(Status.Invalid, "CPU",
                            () => pool.SetCudaScoring(CudaScoreMethod.Products, 0, true));
                Check.Fails(Status.Invalid, "9", () => pool.SetCudaScoring((CudaScoreMethod)9));
                Sequence sequence = pool.CreateSequence();
                Check.Fails(Status.Invalid, "CPU", () => pool.SetCudaScores(
                    sequence, 0, 0, 1, IntPtr.Zero, IntPtr.Zero));
                Step step = pool.BeginStep();
                step.Append(sequence, 1);
                Check.Fails(Status.Invalid, "CPU", () => step.UseCudaStream((IntPtr)4096));
                step.Reserve();
                Check.Fails(Status.Invalid, "", () => step.GetCudaTables(0));
                Check.Fails(Status.Invalid, "on the CPU",
                            () => step.GetCudaTables(0, 0, attended: true));
                var nowhere = new DeviceTensor((IntPtr)4096, DataType.Float16, 1, 2, 32);
                Check.Fails(Status.Invalid, "on the CPU",
                            () => step.WriteOnDevice(0, nowhere, nowhere));
                Check.Fails(Status.Invalid, "on the CPU",
                            () => step.AttendOnDevice(0, nowhere, nowhere));
                step.Cancel();
            }
        }

        [Test]
        public static void DeviceMemoryIsForPoolsThatCanBeInIt()
        {
            // Refused before anybody calls them.
            var alone = new CudaAllocator(IntPtr.Zero, (IntPtr)4096, IntPtr.Zero);
            Check.Fails(Status.Invalid, "come together",
                        () => new Pool(Config(Device.Cuda), SmallModel(), alone));
            var both = new CudaAllocator(IntPtr.Zero, (IntPtr)4096, (IntPtr)4096);
            Check.Fails(Status.Invalid, "KV_DEVICE_CUDA",
                        () => new Pool(Config(Device.Cpu), SmallModel(), both));
            PoolConfig elastic = Config(Device.Cuda);
            elastic.Options = PoolOptions.Elastic;
            Check.Fails(Status.Unsupported, "KV_POOL_ELASTIC",
                        () => new Pool(elastic, SmallModel(), both));
        }

        [Test]
        public static void APoolOnTheDeviceTakesNothingOfTheHost()
        {
            Pool pool;
            try
            {
                pool = new Pool(Config(Device.Cuda), SmallModel());
            }
            catch (KvrtException error)
            {
                Check.Equal(Status.Unsupported, error.Status, error.Message);
                Console.WriteLine($"a pool on CUDA: skipped: {error.Message}");
                return;
            }
            using (pool)
            {
                Sequence sequence = pool.CreateSequence();
                Step step = pool.BeginStep();
                step.Append(sequence, 1);
                var layout = new TensorLayout(1, 2, 32);
                Check.Fails(Status.Invalid, "WriteOnDevice", () => step.Write(
                    0, ReadOnlyTensor.Float32(new float[64], layout),
                    ReadOnlyTensor.Float32(new float[64], layout)));
                step.Cancel();
            }
        }
    }
}
