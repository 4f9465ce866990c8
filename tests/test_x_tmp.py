import torch, time, pytest
def test_x(recipe_function, toy, loop):
    r=recipe_function().check()
    for bs,mb in ((64,64),(1,1),(16,7),(None,10**6)):
        p=toy(r); g,log=loop.gradient(p,r,mb,batch_size=bs or 10**6)
        print(recipe_function.__name__,bs,mb,log['ratio/deviation'],p.forwards,p.backwards)
    for dt in (torch.float32,torch.float64):
        gs=[loop.gradient(toy(r,dt),r,mb)[0] for mb in (1,7,10**6)]
        print(dt,gs[0].dtype,[float((g-gs[-1]).norm()/gs[-1].norm()) for g in gs], float(gs[-1].norm()))
    p=toy(r); l=loop.learner(p); t=time.time(); rew=[]
    for i in range(100):
        log=loop.update(p,r,l,i); rew.append(log['reward/red'])
    print(recipe_function.__name__, sum(rew[:5])/5, sum(rew[45:50])/5, sum(rew[-5:])/5, time.time()-t); print(log)
