// How the native library is found, in processes of their own: it is looked for once.
using System;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Reflection;
using Kvrt.Native;

namespace Kvrt.Tests
{
    internal static class LoaderTests
    {
        /// <summary>What such a process does: prints the version and which files of the library it
        /// has mapped, or the error, and fails.</summary>
        public static int LoadInThisProcess()
        {
            try
            {
                Console.WriteLine("version " + Library.Version);
                foreach (string file in File.ReadAllLines("/proc/self/maps")
                    .Where(line => line.Contains("/libkvrt.so"))
                    .Select(line => line.Substring(line.IndexOf('/'))).Distinct())
                {
                    Console.WriteLine("mapped " + file);
                }
                return 0;
            }
            catch (DllNotFoundException error)
            {
                Console.WriteLine(error.Message);
                return 1;
            }
        }

        private static string Load(
            int expectedExit, string library, string searchPath, string program)
        {
#if NETCOREAPP
            string arguments = $"exec \"{program}\" --load";
#else
            string arguments = $"\"{program}\" --load";
#endif
            string runtime = Process.GetCurrentProcess().MainModule.FileName;
            var start = new ProcessStartInfo(runtime, arguments)
            {
                UseShellExecute = false,
                RedirectStandardOutput = true,
                RedirectStandardError = true
            };
            start.EnvironmentVariables["LD_LIBRARY_PATH"] = searchPath;
            start.EnvironmentVariables.Remove(NativeLoader.PathVariable);
            if (library != null)
            {
                start.EnvironmentVariables[NativeLoader.PathVariable] = library;
            }
            using (Process process = Process.Start(start))
            {
                string output = process.StandardOutput.ReadToEnd();
                output += process.StandardError.ReadToEnd();
                process.WaitForExit();
                Check.Equal(expectedExit, process.ExitCode, "exit status with: " + output);
                return output;
            }
        }

        private static string Program => Assembly.GetExecutingAssembly().Location;

        /// <summary>The file of the library that this process found by the system's
        /// loader.</summary>
        private static string InstalledFile()
        {
            string path = Environment.GetEnvironmentVariable("LD_LIBRARY_PATH") ?? "";
            foreach (string folder in path.Split(':'))
            {
                string file = Path.Combine(folder, "libkvrt.so.0");
                if (folder.Length != 0 && File.Exists(file))
                {
                    return file;
                }
            }
            throw new CheckException("LD_LIBRARY_PATH does not lead to libkvrt.so.0");
        }

        [Test]
        public static void TheSystemsLoaderFindsIt()
        {
            string output = Load(0, null, Path.GetDirectoryName(InstalledFile()), Program);
            Check.Contains("version " + NativeConstants.KVRT_VERSION, output, "output");
        }

        [Test]
        public static void TheVariableNamesItsFile()
        {
            string output = Load(0, InstalledFile(), "", Program);
            Check.Contains("version " + NativeConstants.KVRT_VERSION, output, "output");
        }

        [Test]
        public static void TheVariableIsNotOverruled()
        {
            string output = Load(1, "/nowhere/libkvrt.so.0",
                                 Path.GetDirectoryName(InstalledFile()), Program);
            Check.Contains("\n  /nowhere/libkvrt.so.0: ", output, "what was tried");
            Check.True(!output.Contains("\n  libkvrt.so.0: "), "the system's loader was not asked");
        }

        /// <summary>Beside the assembly comes before the system, and the variable before both.
        /// </summary>
        [Test]
        public static void ItIsFoundBesideTheAssembly()
        {
            InCopyOfThisProgram(program =>
            {
                string beside = Path.Combine(Path.GetDirectoryName(program), "libkvrt.so.0");
                string chosen = Path.Combine(Path.GetDirectoryName(program), "libkvrt.so.chosen");
                File.Copy(InstalledFile(), beside);
                File.Copy(InstalledFile(), chosen);
                string system = Path.GetDirectoryName(InstalledFile());
                string version = "version " + NativeConstants.KVRT_VERSION + "\n";
                Check.Equal(version + "mapped " + beside + "\n",
                            Load(0, null, system, program), "beside");
                Check.Equal(version + "mapped " + chosen + "\n",
                            Load(0, chosen, system, program), "by the variable");
            });
        }

        [Test]
        public static void AFailureSaysAllThatWasTried()
        {
            InCopyOfThisProgram(program =>
            {
                string output = Load(1, null, "", program);
                string beside = Path.Combine(Path.GetDirectoryName(program), "libkvrt.so.0");
                Check.Contains("\n  " + beside + ": ", output, "beside the assembly");
                Check.Contains("\n  libkvrt.so.0: ", output, "the system's loader");
                Check.Contains("cannot open shared object file", output, "the loader's own words");
                Check.Contains("KVRT_LIBRARY", output, "what to do");
            });
        }

        [Test]
        public static void AFileThatIsNoLibraryIsNamed()
        {
            string output = Load(1, Program, "", Program);
            Check.Contains(Program + ": ", output, "what was tried");
        }

        private static void InCopyOfThisProgram(Action<string> test)
        {
            string folder = Path.Combine(Path.GetTempPath(), "kvrt-" + Guid.NewGuid());
            Directory.CreateDirectory(folder);
            try
            {
                string here = Path.GetDirectoryName(Program);
                string name = Path.GetFileNameWithoutExtension(Program);
                foreach (string file in new[]
                         { Path.GetFileName(Program), name + ".runtimeconfig.json", "Kvrt.dll",
                           "Kvrt.dll.config" })
                {
                    if (File.Exists(Path.Combine(here, file)))
                    {
                        File.Copy(Path.Combine(here, file), Path.Combine(folder, file));
                    }
                }
                test(Path.Combine(folder, Path.GetFileName(Program)));
            }
            finally
            {
                Directory.Delete(folder, true);
            }
        }
    }
}
